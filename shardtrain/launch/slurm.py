"""`launch slurm`: a job as a batch script that a person can read and change, submitted by sbatch.

The script stands alone: srun starts the ranks, `rank.py` keeps their logs, `outcome.py` says how they ended.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain.errors.exit_codes import REQUEUED
from shardtrain.errors.messages import problems_error
from shardtrain.launch.duration import clock
from shardtrain.launch.job import Job, Launch


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What a batch job asks for beside its ranks.

    Args:
      partition: where to run; None: the cluster's default, as with the account and the QOS.
      account: who pays.
      qos: quality of service.
      job_name: in the queue and before the log's name.
      nodes: how many; None: one an island, or one a rank where islands are unequal.
      gpus_per_island: shared evenly by its processes; None: no GPU.
      cpus_per_island: likewise; None: whole nodes, whose cores the ranks share out themselves.
      mpi: how srun starts an MPI program: pmi2 for MPICH and Intel MPI, pmix for Open MPI.
      requeue: go on in a new job when the time is over, or a node failed.
      sbatch: further options of sbatch, without their dashes: `constraint=a100`.
      setup: lines of shell before the start, such as `module load openmpi`.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_name: str = "shardtrain"
    nodes: int | None = None
    gpus_per_island: int | None = None
    cpus_per_island: int | None = None
    mpi: str = "pmi2"
    requeue: bool = True
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


def launch(job: Job, slurm: Slurm, environ: Mapping[str, str]) -> Launch:
    """The command that submits a job, and the batch script for it.

    Raises:
      ValueError: what does not fit, all of it at once.
    """
    path = job.logs / f"{slurm.job_name}.sbatch"
    return Launch(lines=(("sbatch", str(path)),), files={path: script(job, slurm, environ)})


def script(job: Job, slurm: Slurm, environ: Mapping[str, str]) -> str:
    """The text of the batch script.

    Args:
      job: without hosts; its logs are the folder that holds those of each batch job.
      slurm: what to ask for.
      environ: of this process.

    Raises:
      ValueError: what does not fit, all of it at once.
    """
    nodes = _nodes(job, slurm)
    if problems := _problems(job, slurm, nodes):
        raise problems_error("this batch job cannot be written", problems)
    lines = ["#!/bin/bash", f"# {_what(job, nodes)}", ""]
    lines += [f"#SBATCH {option}" for option in _options(job, slurm, nodes)]
    lines += ["", *slurm.setup]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in job.rank_environment(environ).items()]
    lines += ["", *_run(job, slurm)]
    return "\n".join(lines) + "\n"


def _nodes(job: Job, slurm: Slurm) -> int:
    unequal = not isinstance(job.processes_per_island, int)
    return slurm.nodes if slurm.nodes is not None else job.num_ranks if unequal else job.islands


def _what(job: Job, nodes: int) -> str:
    each = job.processes_per_island
    if not isinstance(each, int):
        return f"{job.islands} islands of {job.processes_text} processes"
    several = f", each of {each} processes" if each > 1 else ""
    if job.islands == nodes:
        return f"an island a node{several}: --nodes alone says how many"
    return f"{job.islands} islands{several}, over all nodes"


def _problems(job: Job, slurm: Slurm, nodes: int) -> list[str]:
    problems = []
    if job.hosts:
        problems.append("hosts are named, and Slurm chooses them; use --sbatch nodelist=a,b")
    if nodes < 1:
        return [*problems, f"nodes is {nodes}; use 1 or more"]
    if job.num_ranks % nodes:
        fixes = " or ".join(str(n) for n in range(job.num_ranks, 0, -1) if job.num_ranks % n == 0)
        problems.append(
            f"{job.num_ranks} ranks cannot be shared evenly by {nodes} nodes: {job.num_ranks} % {nodes} ="
            f" {job.num_ranks % nodes}. Use {fixes} nodes"
        )
    problems += _text_problems(job, slurm) + _straddling(job, nodes)
    for what, count in (("GPUs", slurm.gpus_per_island), ("CPUs", slurm.cpus_per_island)):
        problems += _share_problems(job, what, count)
    return problems


WORD = r"[A-Za-z0-9_][\w.,:/@+=-]*"


def _text_problems(job: Job, slurm: Slurm) -> list[str]:
    """What would become other lines or other options of the script."""
    problems = []
    if not re.fullmatch(r"[\w.-]+", slurm.job_name):
        problems.append(f"job name {slurm.job_name!r} may have letters, digits, . _ and - only")
    for name in ("partition", "account", "qos", "mpi"):
        value = getattr(slurm, name)
        if value is not None and not re.fullmatch(WORD, value):
            problems.append(f"{name} {value!r} may have letters, digits and . , : / @ + = _ - only")
    # sbatch splits the line at blanks, and replaces %j and its like
    if not re.fullmatch(r"[\w./+=@,:-]+", str(job.logs)):
        problems.append(
            f"logs {str(job.logs)!r}: sbatch takes a path of letters, digits and . / + = @ , : _ - only; use"
            " another --logs"
        )
    problems += [
        f"sbatch option {option!r} is more than one line; give each option by itself: --sbatch A B"
        for option in slurm.sbatch
        if len(option.splitlines()) != 1
    ]
    return problems


def _straddling(job: Job, nodes: int) -> list[str]:
    """Islands that have a part of a node and a part of another."""
    each = job.processes_per_island
    if job.num_ranks % nodes or not (found := _straddlers(job, nodes)):
        return []
    fixes = [n for n in range(job.num_ranks, 0, -1) if job.num_ranks % n == 0 and not _straddlers(job, n)]
    numbers = each if isinstance(each, int) else job.processes_text
    return [
        f"islands of {numbers} processes on {nodes} nodes of {job.num_ranks // nodes} ranks: island"
        f" {', '.join(map(str, found))} would have parts of several nodes. Use --nodes"
        f" {' or '.join(map(str, fixes))}, or islands that fill nodes; unequal nodes: launch --hosts a:4,b:8"
        " in an allocation of your own"
    ]


def _straddlers(job: Job, nodes: int) -> list[int]:
    """The islands that neither fill nodes nor lie within one."""
    each, ranks_per_node = job.processes_per_island, job.num_ranks // nodes
    numbers = [each] * job.islands if isinstance(each, int) else list(each)
    starts = [sum(numbers[:i]) for i in range(len(numbers))]
    return [
        island
        for island, (start, number) in enumerate(zip(starts, numbers, strict=True))
        if start // ranks_per_node != (start + number - 1) // ranks_per_node
        and (start % ranks_per_node or number % ranks_per_node)
    ]


def _share_problems(job: Job, what: str, count: int | None) -> list[str]:
    each = job.processes_per_island
    if count is None:
        return []
    if count < 1:
        return [f"{what} per island is {count}; use 1 or more, or leave it out"]
    if not isinstance(each, int):
        return [
            f"{what} per island is {count}, and islands have {job.processes_text} processes; give islands the"
            f" same number, or ask for what each process gets: --sbatch {what.lower()}-per-task=N"
        ]
    if count % each:
        lower = count // each * each
        fixes = " or ".join(str(n) for n in (lower, lower + each) if n)
        return [
            f"{count} {what} of an island cannot be shared evenly by its {each} processes:"
            f" {count} % {each} = {count % each}. Use {fixes}"
        ]
    return []


def _per_task(job: Job, count: int | None) -> int | None:
    return count // job.processes_per_island if count and isinstance(job.processes_per_island, int) else None


def _options(job: Job, slurm: Slurm, nodes: int) -> list[str]:
    gpus, cpus = _per_task(job, slurm.gpus_per_island), _per_task(job, slurm.cpus_per_island)
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    options = [f"--job-name={slurm.job_name}", f"--nodes={nodes}"]
    options += [f"--ntasks-per-node={job.num_ranks // nodes}"]
    options += [f"--cpus-per-task={cpus}"] if cpus else ["--exclusive", "--mem=0"]
    options += [f"--gpus-per-task={gpus}"] if gpus else []
    options += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if job.time_seconds is not None:
        options += [f"--time={clock(job.time_seconds)}", f"--signal=USR1@{job.stop_seconds}"]
    options += ["--requeue" if slurm.requeue else "--no-requeue", "--open-mode=append"]
    options += [f"--output={job.logs}/%x-%j.log"]
    return options + [f"--{option.lstrip('-')}" for option in slurm.sbatch]


def _run(job: Job, slurm: Slurm) -> Sequence[str]:
    gpus, cpus = _per_task(job, slurm.gpus_per_island), _per_task(job, slurm.cpus_per_island)
    keeper = shlex.join((sys.executable, "-m", "shardtrain.launch.rank"))
    outcome = shlex.join((sys.executable, "-m", "shardtrain.launch.outcome"))
    # srun takes over no --cpus-per-task since Slurm 22.05; without one it would bind a rank to one core
    binding = [f"--cpus-per-task={cpus}", "--cpu-bind=cores"] if cpus else ["--cpu-bind=none"]
    binding += [f"--gpus-per-task={gpus}", f"--gpu-bind=per_task:{gpus}"] if gpus else []
    lines = [
        f'logs={shlex.quote(str(job.logs))}/"$SLURM_JOB_ID"',
        'mkdir -p "$logs" && rm -f "$logs"/rank-*.json  # how ranks ended in an earlier start of this job',
        f"srun --mpi={slurm.mpi} --kill-on-bad-exit=1 {' '.join(binding)} \\",
        f'  {keeper} "$logs" -- \\',
        f"  {shlex.join((*job.program, *job.arguments))}",
        "",
        "# the error of the rank that failed first, and its exit code",
        f'{outcome} "$logs" --code $?',
        "code=$?",
    ]
    if slurm.requeue:
        again = " || ".join(f"[ $code -eq {code} ]" for code in REQUEUED)
        lines += [
            f"if {again}; then  # a rank was lost or hung; or the time is over, and the state saved",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return [*lines, "exit $code"]
