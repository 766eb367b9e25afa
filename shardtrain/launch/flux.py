"""`launch flux`: write a batch script of Flux, and submit it by `flux batch`.

`flux batch` starts an instance of Flux on the nodes of the job; the script runs on its first node, and `flux
run` starts the ranks. Flux has no requeue: the script submits itself again to the enclosing instance.
Sources: flux-batch(1), flux-run(1), flux-job(1) (timeleft), flux-environment(7), flux-shell-options(7).
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from shardtrain.errors.messages import refuse
from shardtrain.launch import batch
from shardtrain.launch.components import divide_among_processes
from shardtrain.launch.job import Job
from shardtrain.launch.launcher import Launch, Launcher

MARGIN_SECONDS = 10
"""Seconds between the time limit of the ranks and that of the instance, which gives them no warning."""


@dataclass(frozen=True, kw_only=True)
class Flux:
    """Options of flux.

    Args:
      queue: queue of the cluster; None means its default.
      bank: account to charge; None means the default.
      job_name: name of the job in the queue, and the beginning of the log's name.
      nodes: number of nodes; None means one per island, or one per rank if islands are unequal.
      gpus_per_island: number of GPUs of an island, divided evenly among its processes; None means all GPUs of
        whole nodes, or no GPU if --cpus-per-island is given.
      cpus_per_island: number of CPU cores of an island, divided evenly among its processes; None means whole
        nodes, whose cores the ranks divide among themselves.
      pmi: process management interface of MPI: simple for MPICH and Intel MPI, pmix (a plugin of Flux) for
        Open MPI.
      requeue: submit the job again if its time limit is over, or a rank was lost or hung.
      flux: further options of flux batch without their dashes, such as `requires=host:a`.
      setup: lines of shell to run before the start, such as `module load openmpi`.
    """

    queue: str | None = None
    bank: str | None = None
    job_name: str = "shardtrain"
    nodes: int | None = None
    gpus_per_island: int | None = None
    cpus_per_island: int | None = None
    pmi: str = "simple"
    requeue: bool = True
    flux: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


def launch(job: Job, options: Flux, environ: Mapping[str, str]) -> Launch:
    """Return the command that submits a job, with its batch script; see `script` for the arguments."""
    text = write_script(job, options, environ)
    return batch.make_submission(job, options.job_name, ("flux", "batch"), ".flux", text)


def write_script(job: Job, options: Flux, environ: Mapping[str, str]) -> str:
    """Return the text of the batch script.

    Args:
      job: without hosts; its logs are the parent folder of the logs of each batch job.
      options: the requested resources.
      environ: the environment of this process.

    Raises:
      ValueError: lists every option that is not possible.
    """
    nodes = batch.num_nodes(job, options.nodes)
    refuse("this batch job cannot be written", _problems(job, options, nodes))
    lines = ["#!/bin/bash", f"# {batch.headline(job, nodes)}", ""]
    lines += [f"# flux: {option}" for option in _list_directives(job, options, nodes)]
    lines += ["", *options.setup, *batch.exports(job, environ)]
    # the ranks are bound by Flux, a process to its own GPUs and cores
    lines += ["export SHARDTRAIN_BIND=no"] if options.cpus_per_island else []
    lines += ["", *_run(job, options, nodes)]
    return "\n".join(lines) + "\n"


def _problems(job: Job, options: Flux, nodes: int) -> list[str]:
    problems = []
    if job.hosts:
        problems.append("hosts are named, and Flux chooses them; use --flux requires=host:a,b")
    problems += batch.node_problems(job, nodes)
    words = {name: getattr(options, name) for name in ("queue", "bank", "pmi")}
    problems += batch.text_problems(options.job_name, words, job.logs, options.flux, "flux")
    for what, count in (("GPUs", options.gpus_per_island), ("CPUs", options.cpus_per_island)):
        try:
            if len(set(divide_among_processes(job, count, what))) > 1:
                problems.append(
                    f"{what} per island is {count}, and islands have {job.processes_text} processes; give"
                    " islands the same number, or leave it out: ranks share whole nodes"
                )
        except ValueError as error:
            problems.append(str(error))
    if options.gpus_per_island is not None and options.cpus_per_island is None:
        problems.append(
            f"GPUs per island is {options.gpus_per_island}, without CPUs per island: Flux would give each"
            " process one core. Add --cpus-per-island, or leave both out for whole nodes with all their GPUs"
        )
    return problems


def _list_directives(job: Job, options: Flux, nodes: int) -> list[str]:
    gpus = divide_among_processes(job, options.gpus_per_island, "GPUs")[0]
    cpus = divide_among_processes(job, options.cpus_per_island, "CPUs")[0]
    found = [f"--job-name={options.job_name}", f"--nodes={nodes}"]
    # a slot is the share of one process
    found += [f"--nslots={job.num_ranks}", f"--cores-per-slot={cpus}"] if cpus else ["--exclusive"]
    found += [f"--gpus-per-slot={gpus}"] if gpus else []
    found += [f"--queue={options.queue}"] if options.queue is not None else []
    found += [f"--setattr=system.bank={options.bank}"] if options.bank is not None else []
    found += [f"--time-limit={job.time_seconds}s"] if job.time_seconds is not None else []
    found += [f"--output={job.logs}/{options.job_name}-{{{{id.dec}}}}.log"]
    return found + [shlex.quote(f"--{option.lstrip('-')}") for option in options.flux]


def _run(job: Job, options: Flux, nodes: int) -> list[str]:
    gpus = divide_among_processes(job, options.gpus_per_island, "GPUs")[0]
    cpus = divide_among_processes(job, options.cpus_per_island, "CPUs")[0]
    if cpus:
        ranks = f"--nodes={nodes} --ntasks={job.num_ranks} --cores-per-task={cpus}"
        ranks += f" --gpus-per-task={gpus}" if gpus else ""
        affinity = "-o cpu-affinity=per-task -o gpu-affinity=per-task"
    else:
        ranks = f"--nodes={nodes} --exclusive --tasks-per-node={job.num_ranks // nodes}"
        affinity = "-o cpu-affinity=off"
    limit = []
    if job.time_seconds is not None:
        # what is left of the job's own limit: the instance took some time to start
        limit = [f"left=$(($(flux job timeleft) - {MARGIN_SECONDS}))"]
        ranks += f' --time-limit="$left"s --signal=USR1@{job.stop_seconds}s'
    # ranks that saved may end long before the last one; one that fails ends all
    ending = "-o exit-on-error -o exit-timeout=none"
    return [
        'job=$(flux job id "$(flux getattr jobid)")  # as a decimal number',
        *batch.log_lines(job, '"$job"'),
        *limit,
        f"flux run {ranks} {ending} -o pmi={options.pmi} {affinity} \\",
        *batch.rank_lines(job),
        # $0 is the copy that Flux made of this script when it was submitted
        *batch.end_lines("flux run", 'flux --parent batch "$0"' if options.requeue else None),
    ]


LAUNCHER = Launcher(
    summary="as a batch job of Flux: writes its script and submits it by flux batch",
    options=Flux,
    launch=launch,
)
