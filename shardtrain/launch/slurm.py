"""`launch slurm`: a job as a batch script that a person can read and change, submitted by sbatch.

The script stands alone: srun starts the ranks, `rank.py` keeps their logs, `outcome.py` reports how they
ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardtrain.errors.messages import problems_error
from shardtrain.launch import batch
from shardtrain.launch.duration import clock
from shardtrain.launch.job import Job
from shardtrain.launch.launcher import Launch, Launcher


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Options of slurm.

    Args:
      partition: partition of the cluster; None: its default.
      account: account to charge; None: the default.
      qos: quality of service; None: the default.
      job_name: name of the job in the queue, and the beginning of the log's name.
      nodes: number of nodes; None: one per island, or one per rank if islands are unequal.
      gpus_per_island: number of GPUs of an island, divided evenly among its processes; None: no GPU.
      cpus_per_island: number of CPU cores of an island, divided evenly among its processes; None: whole
        nodes, whose cores the ranks divide among themselves.
      mpi: how srun starts an MPI program: pmi2 for MPICH and Intel MPI, pmix for Open MPI.
      requeue: requeue the job, so that it continues, if its time is over or a rank was lost or hung.
      sbatch: further options of sbatch without their dashes, such as `constraint=a100`.
      setup: lines of shell to run before the start, such as `module load openmpi`.
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


def launch(job: Job, options: Slurm, environ: Mapping[str, str]) -> Launch:
    """Return the command that submits a job, and the batch script for it; arguments are those of `script`."""
    text = script(job, options, environ)
    return batch.submission(job, options.job_name, ("sbatch",), ".sbatch", text)


def script(job: Job, options: Slurm, environ: Mapping[str, str]) -> str:
    """Return the text of the batch script.

    Args:
      job: without hosts; its logs are the folder that holds those of each batch job.
      options: what to ask for.
      environ: of this process.

    Raises:
      ValueError: lists everything that does not fit.
    """
    nodes = batch.num_nodes(job, options.nodes)
    if problems := _problems(job, options, nodes):
        raise problems_error("this batch job cannot be written", problems)
    # the number of nodes stands in one line, to be changed there
    only_nodes = isinstance(job.processes_per_island, int) and job.islands == nodes
    hint = ": --nodes alone says how many" if only_nodes else ""
    lines = ["#!/bin/bash", f"# {batch.headline(job, nodes)}{hint}", ""]
    lines += [f"#SBATCH {option}" for option in _directives(job, options, nodes)]
    lines += ["", *options.setup, *batch.exports(job, environ)]
    lines += ["", *_run(job, options)]
    return "\n".join(lines) + "\n"


def _problems(job: Job, options: Slurm, nodes: int) -> list[str]:
    problems = []
    if job.hosts:
        problems.append("hosts are named, and Slurm chooses them; use --sbatch nodelist=a,b")
    problems += batch.node_problems(job, nodes)
    words = {name: getattr(options, name) for name in ("partition", "account", "qos", "mpi")}
    problems += batch.text_problems(options.job_name, words, job.logs, options.sbatch, "sbatch")
    for what, count in (("GPUs", options.gpus_per_island), ("CPUs", options.cpus_per_island)):
        otherwise = f"ask for what each process gets: --sbatch {what.lower()}-per-task=N"
        problems += batch.share_problems(job, what, count, otherwise)
    return problems


def _directives(job: Job, options: Slurm, nodes: int) -> list[str]:
    gpus = batch.per_process(job, options.gpus_per_island)
    cpus = batch.per_process(job, options.cpus_per_island)
    named = {"partition": options.partition, "account": options.account, "qos": options.qos}
    found = [f"--job-name={options.job_name}", f"--nodes={nodes}"]
    found += [f"--ntasks-per-node={job.num_ranks // nodes}"]
    found += [f"--cpus-per-task={cpus}"] if cpus else ["--exclusive", "--mem=0"]
    found += [f"--gpus-per-task={gpus}"] if gpus else []
    found += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if job.time_seconds is not None:
        found += [f"--time={clock(job.time_seconds)}", f"--signal=USR1@{job.stop_seconds}"]
    found += ["--requeue" if options.requeue else "--no-requeue", "--open-mode=append"]
    found += [f"--output={job.logs}/%x-%j.log"]
    return found + [f"--{option.lstrip('-')}" for option in options.sbatch]


def _run(job: Job, options: Slurm) -> list[str]:
    gpus = batch.per_process(job, options.gpus_per_island)
    cpus = batch.per_process(job, options.cpus_per_island)
    # srun takes over no --cpus-per-task since Slurm 22.05; without one it would bind a rank to one core
    binding = [f"--cpus-per-task={cpus}", "--cpu-bind=cores"] if cpus else ["--cpu-bind=none"]
    binding += [f"--gpus-per-task={gpus}", f"--gpu-bind=per_task:{gpus}"] if gpus else []
    return [
        *batch.log_lines(job, '"$SLURM_JOB_ID"'),
        f"srun --mpi={options.mpi} --kill-on-bad-exit=1 {' '.join(binding)} \\",
        *batch.rank_lines(job),
        *batch.end_lines("srun", 'scontrol requeue "$SLURM_JOB_ID"' if options.requeue else None),
    ]


LAUNCHER = Launcher(
    summary="as a batch job of Slurm: writes its script and submits it by sbatch",
    options=Slurm,
    launch=launch,
)
