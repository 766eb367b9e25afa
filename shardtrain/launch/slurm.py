"""`launch slurm`: write a readable batch script of Slurm, and submit it by sbatch.

The script needs no other file: srun starts the ranks, `rank.py` keeps their logs, `outcome.py` reports how
they ended. Islands on unequal nodes are components of one heterogeneous job, and one step with one MPI world.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardtrain.errors.exit_codes import USAGE_ERROR
from shardtrain.errors.messages import refuse
from shardtrain.islands.cluster import Cluster
from shardtrain.islands.network import ADDRESS
from shardtrain.launch import batch
from shardtrain.launch.components import (
    Component,
    Shares,
    components,
    divide_among_processes,
    parse_counts,
    split_options,
)
from shardtrain.launch.duration import clock
from shardtrain.launch.job import Job
from shardtrain.launch.launcher import Launch, Launcher


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Options of slurm.

    Args:
      partition: partition of the cluster; None means its default.
      account: account to charge; None means the default.
      qos: quality of service; None means the default.
      job_name: name of the job in the queue, and the beginning of the log's name.
      nodes: number of nodes; None means one per island, or one per rank if islands are unequal.
      nodes_per_island: number of nodes of each island, such as 1,1,2,2, or one number for all. Unequal nodes
        become components of a heterogeneous job.
      gpus_per_island: number of GPUs of an island, divided evenly among its processes; one number for all, or
        one each, such as 4,4,8,8. None means no GPU.
      cpus_per_island: number of CPU cores of an island, in the same form; None means whole nodes, whose cores
        the ranks divide among themselves.
      mpi: option --mpi of srun: pmi2 for MPICH and Intel MPI, pmix for Open MPI.
      requeue: requeue the job, so that it continues, if its time limit is over or a rank was lost or hung.
      sbatch: further options of sbatch without their dashes, such as `constraint=a100`; a prefix
        restricts one to the nodes of some islands: `0-1:partition=old`.
      setup: lines of shell to run before the start, such as `module load openmpi`.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_name: str = "shardtrain"
    nodes: int | None = None
    nodes_per_island: str | None = None
    gpus_per_island: int | str | None = None
    cpus_per_island: int | str | None = None
    mpi: str = "pmi2"
    requeue: bool = True
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


def launch(job: Job, options: Slurm, environ: Mapping[str, str]) -> Launch:
    """Return the command that submits a job, with its batch script; see `script` for the arguments."""
    text = write_script(job, options, environ)
    return batch.make_submission(job, options.job_name, ("sbatch",), ".sbatch", text)


def launch_array(job: Job, options: Slurm, environ: Mapping[str, str]) -> tuple[Launch, ...]:
    """Return the command that submits elastic islands as a job array, with its batch script."""
    text = write_array_script(job, options, environ)
    made = batch.make_submission(job, options.job_name, ("sbatch",), ".sbatch", text)
    return (replace(made, log=f"{job.logs}/{options.job_name}-<job>_<task>.log"),)


def write_array_script(job: Job, options: Slurm, environ: Mapping[str, str]) -> str:
    """Return the script of a job array, whose tasks are elastic islands that come and go by themselves.

    Args:
      job: without hosts; its logs are the parent folder of the logs of each task.
      options: the resources of each island.
      environ: the environment of this process.

    Raises:
      ValueError: lists every option that is not possible.
    """
    island, has_mpi = replace(job, islands=1), job.processes_per_island != 1
    common, parts, problems = _components(island, options)
    problems += _problems(job, options)
    refuse("this batch job cannot be written", problems)
    (part,) = parts
    task = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    name, *directives = _list_directives(island, options, part, common, log="%x-%A_%a")
    array = f"--array=0-{job.islands - 1}"
    lines = ["#!/bin/bash", "# elastic islands, a task each: --array alone says how many", ""]
    lines += [f"#SBATCH {option}" for option in (name, array, *directives)]
    lines += [
        "",
        *options.setup,
        *batch.exports(island if has_mpi else replace(island, interface=None), environ),
    ]
    lines += _address_lines(job.interface)
    lines += ["", *batch.log_lines(job, f'"{task}"')]
    # the folder in which the run that they join was begun
    lines += [f"cd {shlex.quote(str(job.folder))}"] if job.folder else []
    lines += [
        f"srun --mpi={options.mpi if has_mpi else 'none'} --kill-on-bad-exit=1 {_binding(part)} \\",
        *batch.rank_lines(job),
        *batch.end_lines("srun", f'scontrol requeue "{task}"' if options.requeue else None),
    ]
    return "\n".join(lines) + "\n"


def _address_lines(interface: str | None) -> list[str]:
    """Return the shell lines that find the address of an interface on the node of the task."""
    if interface is None:
        return []
    program = "import sys; from shardtrain.islands.network import *; print(find_address(sys.argv[1]))"
    return [
        f"{ADDRESS}=$({shlex.join((sys.executable, '-c', program, interface))}) || exit {USAGE_ERROR}",
        f"export {ADDRESS}",
    ]


def write_script(job: Job, options: Slurm, environ: Mapping[str, str]) -> str:
    """Return the text of the batch script.

    Args:
      job: without hosts; its logs are the parent folder of the logs of each batch job.
      options: the requested resources.
      environ: the environment of this process.

    Raises:
      ValueError: lists every option that is not possible.
    """
    common, parts, problems = _components(job, options)
    problems += _problems(job, options)
    refuse("this batch job cannot be written", problems)
    first = parts[0]
    lines = ["#!/bin/bash", f"# {_headline(job, parts)}", ""]
    lines += [f"#SBATCH {option}" for option in _list_directives(job, options, first, common)]
    for component in parts[1:]:
        lines += ["", "#SBATCH hetjob", f"# {_islands_text(component)}"]
        lines += [f"#SBATCH {option}" for option in _list_own_directives(job, options, component, common)]
    lines += ["", *options.setup, *batch.exports(job, environ)]
    lines += ["", *_run(job, options, parts)]
    return "\n".join(lines) + "\n"


def _components(job: Job, options: Slurm) -> tuple[tuple[str, ...], tuple[Component, ...], list[str]]:
    """Return the options of all nodes, the components of the job, and problems."""
    problems: list[str] = []

    def found(make: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return make()
        except ValueError as error:
            problems.append(str(error))
            return otherwise

    none = (None,) * job.islands
    common, own = found(
        lambda: split_options(options.sbatch, job.islands), (options.sbatch, [()] * job.islands)
    )
    nodes = found(lambda: parse_counts(options.nodes_per_island, job.islands, "nodes per island"), none)
    each = {
        what: found(lambda what=what, given=given: divide_among_processes(job, given, what), none)
        for what, given in (("GPUs", options.gpus_per_island), ("CPUs", options.cpus_per_island))
    }
    shares = Shares(
        nodes=None if None in nodes else nodes, gpus=each["GPUs"], cpus=each["CPUs"], options=tuple(own)
    )
    return common, found(lambda: components(job, options.nodes, shares), ()), problems


def _problems(job: Job, options: Slurm) -> list[str]:
    problems = []
    if job.hosts:
        problems.append("hosts are named, and Slurm chooses them; use --sbatch nodelist=a,b")
    words = {name: getattr(options, name) for name in ("partition", "account", "qos", "mpi")}
    return problems + batch.text_problems(options.job_name, words, job.logs, options.sbatch, "sbatch")


def _headline(job: Job, parts: tuple[Component, ...]) -> str:
    nodes = sum(each.nodes for each in parts)
    text = batch.headline(job, nodes)
    if len(parts) > 1:
        several = f"{job.islands} islands of {job.processes_text} processes, in a heterogeneous job"
        return f"{several} of {len(parts)} components; the first: {_islands_text(parts[0])}"
    # the number of nodes stands in one line, to be changed there
    only_nodes = isinstance(job.processes_per_island, int) and job.islands == nodes
    return text + (": --nodes alone says how many" if only_nodes else "")


def _islands_text(component: Component) -> str:
    first, last = component.islands[0], component.islands[-1]
    return f"islands {first} to {last}" if last > first else f"island {first}"


def _list_directives(
    job: Job, options: Slurm, part: Component, common: tuple[str, ...], log: str = "%x-%j"
) -> list[str]:
    own = _list_own_directives(job, options, part, common)
    at = own.index("--requeue" if options.requeue else "--no-requeue") + 1
    # the script runs in the first component: only there it has a name and an output
    output = ["--open-mode=append", f"--output={job.logs}/{log}.log"]
    return [f"--job-name={options.job_name}", *own[:at], *output, *own[at:]]


def _list_own_directives(job: Job, options: Slurm, part: Component, common: tuple[str, ...]) -> list[str]:
    """Return all directives of a component: Slurm resets those that are missing to their defaults."""
    named = {"partition": options.partition, "account": options.account, "qos": options.qos}
    found = [f"--nodes={part.nodes}", f"--ntasks-per-node={part.ranks_per_node}"]
    found += [f"--cpus-per-task={part.cpus}"] if part.cpus else ["--exclusive", "--mem=0"]
    found += [f"--gpus-per-task={part.gpus}"] if part.gpus else []
    found += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if job.time_seconds is not None:
        found += [f"--time={clock(job.time_seconds)}", f"--signal=USR1@{job.stop_seconds}"]
    found += ["--requeue" if options.requeue else "--no-requeue"]
    return found + [f"--{option.lstrip('-')}" for option in (*common, *part.options)]


def _binding(part: Component) -> str:
    # srun takes over no --cpus-per-task since Slurm 22.05; without one it would bind a rank to one core
    words = [f"--cpus-per-task={part.cpus}", "--cpu-bind=cores"] if part.cpus else ["--cpu-bind=none"]
    words += [f"--gpus-per-task={part.gpus}", f"--gpu-bind=per_task:{part.gpus}"] if part.gpus else []
    return " ".join(words)


def _run(job: Job, options: Slurm, parts: tuple[Component, ...]) -> list[str]:
    bindings = [_binding(part) for part in parts]
    if len(parts) == 1:
        words = bindings
    elif len(set(bindings)) == 1:
        words = [f"--het-group={','.join(map(str, range(len(parts))))} {bindings[0]}"]
    else:
        # components that are bound differently; the program after the last is that of all
        words = [f"--het-group={number} {binding}" for number, binding in enumerate(bindings)]
    steps = [f"{word} {':' if word is not words[-1] else ''}".rstrip() + " \\" for word in words]
    return [
        *batch.log_lines(job, '"$SLURM_JOB_ID"'),
        f"srun --mpi={options.mpi} --kill-on-bad-exit=1 {steps[0]}",
        *(f"  {step}" for step in steps[1:]),
        *batch.rank_lines(job),
        *batch.end_lines("srun", 'scontrol requeue "$SLURM_JOB_ID"' if options.requeue else None),
    ]


def add_cluster(options: Slurm, cluster: Cluster) -> Slurm:
    """Return the options with the nodes, devices and launcher options of a cluster's islands.

    Raises:
      ValueError: an option is given, and the cluster file contains it too.
    """
    named = {
        "nodes": options.nodes, "nodes-per-island": options.nodes_per_island,
        "gpus-per-island": options.gpus_per_island,
    }  # fmt: skip
    if given := [f"--{name}" for name, value in named.items() if value is not None]:
        raise ValueError(f"{', '.join(given)} and --cluster are both given; the cluster file says it")
    devices = [kind.devices for kind in cluster.of_islands]
    own = tuple(
        f"{islands}:{name}" + ("" if value is True else f"={value}")
        for islands, kind in cluster.sections
        for name, value in kind.launch.get("slurm", {}).items()
    )
    return replace(
        options,
        nodes_per_island=",".join(str(kind.nodes) for kind in cluster.of_islands),
        gpus_per_island=None if None in devices else ",".join(map(str, devices)),
        sbatch=(*options.sbatch, *own),
    )


LAUNCHER = Launcher(
    summary="as a batch job of Slurm: writes its script and submits it by sbatch",
    options=Slurm,
    launch=launch,
    with_cluster=add_cluster,
    elastic=launch_array,
)
