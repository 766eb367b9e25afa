"""`shardtrain launch [local|mpi|slurm] ... -- train RUN ...`: start a command as islands, on this machine,
on others, or by a batch system.
"""

import itertools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shardtrain.cli import COMMANDS
from shardtrain.errors.exit_codes import COME_AGAIN
from shardtrain.errors.messages import near
from shardtrain.islands.rank_environment import parse_processes
from shardtrain.launch import local, mpi, slurm
from shardtrain.launch.duration import parse_time
from shardtrain.launch.job import Host, Job, Launch, parse_hosts, read_hostfile, shell_text
from shardtrain.launch.log_folder import claim, write_new
from shardtrain.launch.restarts import Ended, Restarts, run_again
from shardtrain.launch.supervise import supervise_once
from shardtrain.system import terminal

KINDS = {
    "local": "by mpiexec on this machine (the default; with --hosts or --hostfile it is mpi)",
    "mpi": "by mpiexec on --hosts, --hostfile, or the hosts of the batch job around it",
    "slurm": "as a batch job: writes its script and submits it",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every kind of launch.

    Args:
      islands: how many islands, each a JAX runtime of its own; by default one a host, or one a number
        in --processes-per-island, else 1.
      processes_per_island: one number for all islands, or one each: 1,3.
      logs: the folder for one log a rank, by default logs/DATE-TIME; where an earlier launch has it,
        one with a number behind its name.
      interface: the network interface of the ranks, such as eth1 or ib0, on which alone they listen; by
        default that of loopback on one machine, and on several as MPI chooses.
      time: the most it may take, as Slurm writes it: 01:30:00.
      signal_seconds: so long before --time the ranks are asked to stop and save.
      dry_run: print what would be run, and run nothing.
    """

    islands: int | None = None
    processes_per_island: str = "1"
    logs: Path | None = None
    interface: str | None = None
    time: str | None = None
    signal_seconds: int = 120
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class MpiOptions:
    """Options of local and mpi.

    Args:
      restarts: after a crash or a hang, start again as often; given up where one step fails twice in a row.
      backoff: seconds before the first restart; each later one waits twice as long, up to a minute.
      hosts: names, in the order of the islands: a,b,c; or with the ranks of each: a:1,b:3.
      hostfile: the same as a file, one host a line: a, or a:2, or a slots=2.
      mpiexec: the launcher; by default that of this Python's environment, else of PATH.
    """

    restarts: int = 0
    backoff: float = 1.0
    hosts: str | None = None
    hostfile: Path | None = None
    mpiexec: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Launch.

    Returns:
      The exit code of the rank that failed first, 128 + n for a signal; 0 after --dry-run and where a
      batch job was submitted.
    """
    own, program = split(arguments)
    kind, words = _kind(own)
    if program is None and not {"-h", "--help"} & set(own):
        raise ValueError(_missing(own))
    options, special = _parse(kind, words)
    assert program is not None
    if problem := program_problem(program):
        raise ValueError(problem)
    if kind == "slurm":
        return _submit(_job(options, (), program, Path("logs")), special, options.dry_run)
    hosts = _hosts(special)
    if hosts and kind == "local":
        raise ValueError("launch local is for this machine, and hosts are given; use: launch mpi")
    job = _job(options, hosts, program, Path("logs") / f"{datetime.now():%Y%m%d-%H%M%S}")
    return _run("mpi" if hosts else kind or "local", job, special, options.dry_run)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What stands before the first `--`, and behind it (None: there is none).

    >>> split(["--islands", "2", "--", "train", "run.py"])
    (['--islands', '2'], ['train', 'run.py'])
    """
    arguments = list(arguments)
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _kind(words: list[str]) -> tuple[str | None, list[str]]:
    if not words or words[0].startswith("-"):
        return None, words
    if words[0] in KINDS:
        return words[0], words[1:]
    if {"-h", "--help"} & set(words) or words[0] in COMMANDS or words[0].endswith(".py"):
        return None, words[1:] if {"-h", "--help"} & set(words) else words
    raise ValueError(f"there is no launch {near(words[0], KINDS)}")


def _missing(own: Sequence[str]) -> str:
    example = "shardtrain launch --islands 2 -- train examples/gpt_text.py"
    command = next((i for i, word in enumerate(own) if word in COMMANDS), None)
    if command is not None:
        words = ["shardtrain launch", *own[:command], "--", *own[command:]]
        return f"what to launch stands behind --, as in: {' '.join(words)}"
    return f"what to launch is missing; it stands behind --, as in: {example}"


def program_problem(program: Sequence[str]) -> str | None:
    """Why this cannot be launched; None where it can."""
    known = [command for command in COMMANDS if command != "launch"]
    if not program:
        return "nothing stands behind --; write the command there: -- train examples/gpt_text.py"
    if program[0] not in known:
        return f"behind -- stands a command of shardtrain, and not {near(program[0], known)}"
    return None


def _parse(kind: str | None, words: Sequence[str]) -> tuple[Options, Any]:
    import tyro

    flat = tyro.conf.OmitArgPrefixes
    special = slurm.Slurm if kind == "slurm" else MpiOptions
    members = [("launch", flat[Options], field(default=Options()))]
    members += [(kind or "local", flat[special], field(default=special()))]
    kinds = "\n".join(f"  {name:6} {what}" for name, what in KINDS.items())
    parsed = tyro.cli(
        make_dataclass("Parsed", members, frozen=True, kw_only=True),
        args=list(words),
        prog=f"shardtrain launch{f' {kind}' if kind else ''} ... -- COMMAND ...",
        description=f"Start a command of shardtrain as islands: launch [KIND] ... -- train RUN ...\n{kinds}",
    )
    return parsed.launch, getattr(parsed, kind or "local")


def _hosts(options: MpiOptions) -> tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        raise ValueError("--hosts and --hostfile are both given; use one of them")
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    return parse_hosts(options.hosts) if options.hosts is not None else ()


def _job(options: Options, hosts: tuple[Host, ...], program: Sequence[str], logs: Path) -> Job:
    processes = parse_processes(options.processes_per_island)
    islands = options.islands
    if islands is None:
        islands = (len(hosts) or 1) if isinstance(processes, int) else len(processes)
    return Job(
        arguments=tuple(program),
        islands=islands,
        processes_per_island=processes,
        hosts=hosts,
        logs=options.logs or logs,
        interface=options.interface,
        time_seconds=None if options.time is None else parse_time(options.time),
        stop_seconds=options.signal_seconds,
    )


def _submit(job: Job, options: slurm.Slurm, dry_run: bool) -> int:
    launch = slurm.launch(job, options, os.environ)
    (path, text), *_ = launch.files.items()
    if dry_run:
        sys.stdout.write(text)
        return 0
    if shutil.which("sbatch") is None:
        raise ValueError("there is no sbatch on PATH: is this a login node? --dry-run prints the script")
    import subprocess

    path.parent.mkdir(parents=True, exist_ok=True)
    stem, numbers = path.stem, itertools.count(2)
    # never that of another launch, which sbatch may be about to read
    while not write_new(path, text):
        path = path.with_name(f"{stem}-{next(numbers)}.sbatch")
    terminal.err(f"launch: wrote {path}; logs will be {job.logs}/{options.job_name}-<job>.log\n")
    return subprocess.run(["sbatch", str(path)], check=False).returncode


def _run(kind: str, job: Job, options: MpiOptions, dry_run: bool) -> int:
    restarts = Restarts(most=options.restarts, backoff_seconds=options.backoff)
    mpiexec = mpi.find_mpiexec(options.mpiexec)
    if not dry_run:
        job = replace(job, logs=claim(job.logs))
    launch: Launch = (local if kind == "local" else mpi).launch(job, mpiexec, os.environ)
    if dry_run:
        sys.stdout.write(shell_text(launch))
        return 0
    environ = local.own_environment(os.environ) if kind == "local" else dict(os.environ)
    what = f"{job.islands} island{'s' * (job.islands > 1)}"
    ranks = f" ({job.num_ranks} ranks)" if job.num_ranks != job.islands else ""
    terminal.err(f"launch: {what}{ranks} by {mpiexec.path}; a log for each rank in {job.logs}\n")
    until = None if job.time_seconds is None else time.monotonic() + job.time_seconds

    def start(number: int) -> Ended:
        left = None if until is None else until - time.monotonic()
        if number and left is not None and left <= job.stop_seconds:
            terminal.err("launch: not started again: the time limit is near\n")
            return Ended(code=COME_AGAIN, asked=True, step=0)
        return supervise_once(launch, job.logs, environ, time_seconds=left, stop_seconds=job.stop_seconds)

    return run_again(start, restarts, terminal.err)
