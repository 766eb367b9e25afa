"""Write the common parts of batch scripts: placement of ranks, checks of values, logs, and the end.

`slurm.py` and `flux.py` add the directives and commands of their schedulers.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from shardtrain.errors.exit_codes import REQUEUED
from shardtrain.islands.cluster import option_problem
from shardtrain.launch.job import Job
from shardtrain.launch.launcher import Launch
from shardtrain.system.excerpts import short

WORD = r"[A-Za-z0-9_][\w.,:/@+=-]*"
"""Pattern of a value that is one word in one line of a script."""

PATH = r"[\w./+=@,:-]+"


def make_submission(job: Job, job_name: str, submit: tuple[str, ...], ending: str, script: str) -> Launch:
    """Return the command that submits a batch job, and its script as a file in the log folder.

    Args:
      job: without hosts; its logs are the parent folder of the logs of each batch job.
      job_name: name of the batch job, with which the names of its script and log begin.
      submit: the words of the command before the path of the script.
      ending: ending of the name of the script.
      script: text of the script.
    """
    path = job.logs / f"{job_name}{ending}"
    return Launch(lines=((*submit, str(path)),), files={path: script}, log=f"{job.logs}/{job_name}-<job>.log")


def num_nodes(job: Job, asked: int | None) -> int:
    """Return the number of nodes: as requested, else one per island, or per rank if islands are unequal."""
    if asked is not None:
        return asked
    return job.islands if isinstance(job.processes_per_island, int) else job.num_ranks


def headline(job: Job, nodes: int) -> str:
    """Describe a job in one line, for the head of its script."""
    each = job.processes_per_island
    if not isinstance(each, int):
        return f"{job.islands} islands of {job.processes_text} processes"
    several = f", each of {each} processes" if each > 1 else ""
    if job.islands == nodes:
        return f"an island a node{several}"
    return f"{job.islands} islands{several}, over all nodes"


def node_problems(job: Job, nodes: int) -> list[str]:
    """List why the ranks cannot be placed on this number of nodes without islands that straddle nodes."""
    if nodes < 1:
        return [f"nodes is {nodes}; use 1 or more"]
    if job.num_ranks % nodes:
        fixes = " or ".join(str(n) for n in range(job.num_ranks, 0, -1) if job.num_ranks % n == 0)
        return [
            f"{job.num_ranks} ranks cannot be shared evenly by {nodes} nodes: {job.num_ranks} % {nodes} ="
            f" {job.num_ranks % nodes}. Use {fixes} nodes"
        ]
    if not (found := _straddling(job, nodes)):
        return []
    fixes = [n for n in range(job.num_ranks, 0, -1) if job.num_ranks % n == 0 and not _straddling(job, n)]
    return [
        f"islands of {job.processes_text} processes on {nodes} nodes of {job.num_ranks // nodes} ranks:"
        f" island {', '.join(map(str, found))} would have parts of several nodes. Use --nodes"
        f" {' or '.join(map(str, fixes))}, or islands that fill nodes; unequal nodes: launch --hosts a:4,b:8"
        " in an allocation of your own"
    ]


def _straddling(job: Job, nodes: int) -> list[int]:
    """Return the islands that neither fill whole nodes nor fit within one."""
    ranks_per_node, starts = job.num_ranks // nodes, accumulate(job.processes, initial=0)
    return [
        island
        for island, (start, number) in enumerate(zip(starts, job.processes, strict=False))
        if start // ranks_per_node != (start + number - 1) // ranks_per_node
        and (start % ranks_per_node or number % ranks_per_node)
    ]


def text_problems(
    job_name: str, words: Mapping[str, str | None], logs: Path, options: Sequence[str], command: str
) -> list[str]:
    """List the values that would become other lines or other options of the script.

    Args:
      job_name: the name of the batch job.
      words: option -> its value, which must be one word; None if not given.
      logs: the folder of the logs.
      options: the options of the submitting command, as the user wrote them.
      command: the submitting command, also the name of the option that gave `options`.
    """
    problems = []
    if not re.fullmatch(r"[\w.-]+", job_name):
        problems.append(f"job name {job_name!r} may have letters, digits, . _ and - only")
    for name, value in words.items():
        if value is not None and not re.fullmatch(WORD, value):
            problems.append(f"{name} {value!r} may have letters, digits and . , : / @ + = _ - only")
    # a scheduler splits the line at blanks, and replaces templates such as %j and {{id}}
    if not re.fullmatch(PATH, str(logs)):
        problems.append(
            f"logs {str(logs)!r}: {command} takes a path of letters, digits and . / + = @ , : _ - only; use"
            " another --logs"
        )
    problems += [
        f"{command} option {short(option)} {problem}: --{command} A B"
        for option in options
        if (problem := option_problem(option))
    ]
    return problems


def exports(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return the shell lines that set the environment of every rank."""
    return [f"export {name}={shlex.quote(value)}" for name, value in job.rank_environment(environ).items()]


def log_lines(job: Job, job_id: str) -> list[str]:
    """Return the shell lines that create the log folder and remove the records of an earlier start.

    Args:
      job: its logs are the parent folder of the logs of each batch job.
      job_id: shell expression for the number of the batch job.
    """
    return [
        f"logs={shlex.quote(str(job.logs))}/{job_id}",
        'mkdir -p "$logs" && rm -f "$logs"/rank-*.json  # how ranks ended in an earlier start of this job',
    ]


def rank_lines(job: Job) -> list[str]:
    """Return the shell lines with the command of a rank, which follow the command that starts ranks."""
    keeper = shlex.join((sys.executable, "-m", "shardtrain.launch.rank"))
    return [f'  {keeper} "$logs" -- \\', f"  {shlex.join((*job.program, *job.arguments))}"]


def end_lines(launcher: str, again: str | None) -> list[str]:
    """Return the end of a script: report the outcome, and requeue the job if another start continues it.

    Args:
      launcher: the command that started the ranks, whose exit code is in `$?`.
      again: the command that requeues the job; None disables it.
    """
    outcome = shlex.join((sys.executable, "-m", "shardtrain.launch.outcome"))
    named = "" if launcher == "srun" else f" --launcher {shlex.quote(launcher)}"
    lines = [
        "",
        "# the error of the rank that failed first, and its exit code",
        f'{outcome} "$logs" --code $?{named}',
        "code=$?",
    ]
    if again is not None:
        codes = " || ".join(f"[ $code -eq {code} ]" for code in REQUEUED)
        lines += [
            f"if {codes}; then  # a rank was lost or hung; or the time is over, and the state saved",
            f"  {again}",
            "fi",
        ]
    return [*lines, "exit $code"]
