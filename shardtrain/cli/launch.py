"""`shardtrain launch [LAUNCHER] ... -- train RUN ...`: start a command as islands, here or on other hosts.

`launch --join RUN_FOLDER` starts islands of an elastic run by the command that the folder holds.
Next: `launch/registry.py`, which lists the launchers.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shardtrain.cli import COMMANDS
from shardtrain.cli.arguments import find_values, parse_words
from shardtrain.elastic.options import Elastic
from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.errors.messages import near, refuse
from shardtrain.islands.cluster import Cluster, read_cluster
from shardtrain.islands.network import LOOPBACK
from shardtrain.islands.rank_placement import parse_processes
from shardtrain.launch.duration import parse_time
from shardtrain.launch.elastic import supervise_islands
from shardtrain.launch.hosts import Host, hosts_of_cluster
from shardtrain.launch.job import Job
from shardtrain.launch.join import add_command, check_elastic, find_processes
from shardtrain.launch.launcher import Launch, Launcher, shell_text
from shardtrain.launch.log_folder import claim, write_new
from shardtrain.launch.registry import DEFAULT, LAUNCHERS, WITH_HOSTS
from shardtrain.launch.restarts import LaunchEnd, Restarts, run_again
from shardtrain.launch.supervise import supervise_once
from shardtrain.system import terminal

OF_RUNS = ("train", "inspect")
"""Commands that take a run, and therefore --cluster."""

ELASTIC = ("--elastic", "--elastic.islands")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every launcher.

    Args:
      elastic: fewest and most islands of an elastic run, such as 2..5, without MPI between them, which
        can die and join while it trains. One that dies is started again if there are restarts left.
      join: folder of an elastic run. Its islands are started by the command of the run; further options of
        train may follow after --.
      islands: number of islands; each is a separate JAX runtime. By default, one per host, or one per number
        in --processes-per-island, or the fewest of --elastic, or else 1.
      processes_per_island: number of processes of each island: one number for all, or one for each, such as
        1,3. They share a mesh; with --elastic and --across pipeline each is a stage. By default 1, or with
        --join as many as the newest island has.
      cluster: cluster file with the kinds of islands, such as meshes/two_kinds_of_islands.toml. It sets their
        number, nodes, processes, devices, launcher options and fields of the strategy.
      logs: folder for one log per rank. By default, logs/DATE-TIME. A number is added to the name if another
        launch uses the folder.
      interface: network interface of the ranks, such as eth1 or ib0. By default, loopback on one machine,
        and the choice of MPI on several.
      time: time limit in the format of Slurm, such as 01:30:00.
      signal_seconds: seconds before the end of --time at which the ranks are asked to save and stop.
      dry_run: print the command or script without running it.
    """

    elastic: str | None = None
    join: Path | None = None
    islands: int | None = None
    processes_per_island: str | None = None
    cluster: Path | None = None
    logs: Path | None = None
    interface: str | None = None
    time: str | None = None
    signal_seconds: int = 120
    dry_run: bool = False


def main(arguments: Sequence[str]) -> int:
    """Start the command after `--` as islands, or submit it as a batch job.

    Returns:
      The exit code of the rank that failed first (128 + n for a signal n); 0 after --dry-run, and if a batch
      job was submitted.
    """
    own, program = split(arguments)
    name, words = _find_launcher(own)
    joins = bool(find_values(own, "--join"))
    if program is None and not joins and not {"-h", "--help"} & set(own):
        raise ValueError(_format_missing(own))
    options, special = _parse(name, words)
    program = program or []
    if problem := _find_problem(program, options):
        raise ValueError(problem)
    launcher = LAUNCHERS[name or DEFAULT]
    hosts = launcher.hosts(special)
    if hosts and name is None:
        launcher = LAUNCHERS[WITH_HOSTS]
    if options.cluster is not None:
        cluster = _read_cluster(options.cluster, options)
        processes = [str(kind.processes) for kind in cluster.of_islands]
        joined = processes[0] if len(set(processes)) == 1 else ",".join(processes)
        options = replace(options, islands=len(processes), processes_per_island=joined)
        hosts = hosts_of_cluster(hosts, cluster)
        special = launcher.with_cluster(special, cluster) if launcher.with_cluster else special
        if cluster.strategy_sections and program[0] in OF_RUNS:
            program = [*program, "--cluster", str(options.cluster)]
    job = _make_job(options, hosts, program)
    if launcher.restarts is not None:
        job = replace(job, logs=options.logs or job.logs / f"{datetime.now():%Y%m%d-%H%M%S}")
    if joins or options.elastic:
        return _launch_elastic(launcher, job, special, options)
    if launcher.restarts is None:
        return _submit(launcher.launch(job, special, os.environ), options.dry_run)
    return _run(launcher, job, special, options.dry_run)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the words before the first `--`, and the words after it, or None without `--`.

    >>> split(["--islands", "2", "--", "train", "run.py"])
    (['--islands', '2'], ['train', 'run.py'])
    """
    arguments = list(arguments)
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _find_launcher(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the name of the launcher, None for the default, and the other words."""
    if not words or words[0].startswith("-"):
        return None, words
    if words[0] in LAUNCHERS:
        return words[0], words[1:]
    if {"-h", "--help"} & set(words) or words[0] in COMMANDS or words[0].endswith(".py"):
        return None, words[1:] if {"-h", "--help"} & set(words) else words
    raise ValueError(f"there is no launch {near(words[0], LAUNCHERS)}")


def _format_missing(own: Sequence[str]) -> str:
    example = "shardtrain launch --islands 2 -- train examples/gpt_text.py"
    command = next((i for i, word in enumerate(own) if word in COMMANDS), None)
    if command is not None:
        words = ["shardtrain launch", *own[:command], "--", *own[command:]]
        return f"the command to launch goes after --, as in: {' '.join(words)}"
    return f"the command to launch is missing; it goes after --, as in: {example}"


def _find_problem(program: Sequence[str], options: Options) -> str | None:
    """Return why the words after --, --elastic and --join cannot be launched; None if they can be."""
    if options.join is not None:
        given = [f"--{name}" for name in ("elastic", "cluster") if getattr(options, name) is not None]
        return f"{' and '.join(given)} and --join are given; the run has its own" if given else None
    known = [command for command in COMMANDS if command != "launch"]
    if not program:
        return "there is nothing after --; write the command there: -- train examples/gpt_text.py"
    if program[0] not in known:
        return f"after -- must be a command of shardtrain, not {near(program[0], known)}"
    given = find_values(program, *ELASTIC) if program[0] == "train" else []
    if not options.elastic:
        # several processes may be one elastic island
        is_apart = bool(given) and options.processes_per_island in (None, "1")
        return f"--elastic goes before --: launch --elastic {given[0]} ... -- train RUN" if is_apart else None
    if program[0] != "train":
        return f"--elastic is for `train`, and after -- is {program[0]}; leave it out"
    if given:
        return f"--elastic {given[0]} is given after -- too; leave that out"
    return "--elastic and --cluster are both given; use one of them" if options.cluster else None


def _parse(name: str | None, words: Sequence[str]) -> tuple[Options, Any]:
    """Parse the options of every launcher, and of the named one."""
    import tyro

    flat = tyro.conf.OmitArgPrefixes
    special = LAUNCHERS[name or DEFAULT].options
    members = [("launch", flat[Options], field(default=Options()))]
    members += [(name or DEFAULT, flat[special], field(default=special()))]
    launchers = "\n".join(f"  {name:6} {launcher.summary}" for name, launcher in LAUNCHERS.items())
    parsed = parse_words(
        make_dataclass("Parsed", members, frozen=True, kw_only=True),
        list(words),
        prog=f"shardtrain launch{f' {name}' if name else ''} ... -- COMMAND ...",
        description="Start a command of shardtrain as islands: launch [LAUNCHER] ... -- train RUN ...\n"
        f"{launchers}",
    )
    return parsed.launch, getattr(parsed, name or DEFAULT)


def _read_cluster(path: Path, options: Options) -> Cluster:
    """Read the cluster file.

    Raises:
      ValueError: other options set its islands, or it has options of an unknown launcher.
    """
    fields = ("islands", "processes_per_island")
    if given := [name for name in fields if getattr(options, name) != getattr(Options(), name)]:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{names} and --cluster are given; the cluster file sets both")
    cluster = read_cluster(path)
    takers = [name for name, launcher in LAUNCHERS.items() if launcher.with_cluster]
    problems = [
        f"kind {kind.kind}: launch.{name} does not name a launcher that takes options from a cluster file:"
        f" {near(name, takers)}"
        for kind in cluster.islands
        for name in kind.launch
        if name not in takers
    ]
    refuse(f"{path} cannot be used", problems)
    return cluster


def _make_job(options: Options, hosts: tuple[Host, ...], program: Sequence[str]) -> Job:
    processes = parse_processes(options.processes_per_island or "1")
    islands = options.islands
    if islands is None:
        one = Elastic(islands=options.elastic or "").fewest or 1
        islands = (len(hosts) or one) if isinstance(processes, int) else len(processes)
    return Job(
        arguments=tuple(program),
        islands=islands,
        processes_per_island=processes,
        hosts=hosts,
        logs=options.logs or Path("logs"),
        interface=options.interface,
        time_seconds=None if options.time is None else parse_time(options.time),
        stop_seconds=options.signal_seconds,
    )


def _launch_elastic(launcher: Launcher, job: Job, special: Any, options: Options) -> int:
    """Start elastic islands and wait for them, or submit them."""
    here, islands = launcher.restarts is not None, options.elastic
    if options.join is not None:
        job = replace(add_command(job, options.join, here=here), logs=job.logs.absolute())
        if options.processes_per_island is None:
            job = replace(job, processes_per_island=find_processes(options.join))
        terminal.err(f"launch: joins by: {shlex.join(job.arguments)}\n")
        if job.folder is None:
            terminal.err("launch: the folder in which the run was begun is not here: started in this one\n")
        islands = next(reversed(find_values(job.arguments, *ELASTIC)), None)
    else:
        arguments = (*job.arguments, "--elastic", str(islands))
        job = replace(job, arguments=arguments, interface=job.interface or (LOOPBACK if here else None))
    name = next(name for name, each in LAUNCHERS.items() if each is launcher)
    check_elastic(job, islands, name, can_start=launcher.elastic is not None)
    assert launcher.elastic is not None
    if launcher.restarts is not None and not options.dry_run:
        job = replace(job, logs=claim(job.logs))
    launches = launcher.elastic(job, special, os.environ)
    if launcher.restarts is None:
        return _submit(launches[0], options.dry_run)
    restarts: Restarts = launcher.restarts(special)
    if options.dry_run:
        sys.stdout.write(" &\n".join(shell_text(each).rstrip("\n") for each in launches) + "\n")
        return 0
    terminal.err(f"launch: {_count_islands(job)}; a log for each in {job.logs}\n")
    limits = {"time_seconds": job.time_seconds, "stop_seconds": job.stop_seconds}
    return supervise_islands(launches, job.logs, restarts, os.environ, **limits)


def _count_islands(job: Job) -> str:
    return f"{job.islands} island{'s' * (job.islands > 1)}"


def _submit(launch: Launch, dry_run: bool) -> int:
    """Write a batch script and submit it."""
    (path, text), *_ = launch.files.items()
    if dry_run:
        sys.stdout.write(text)
        return 0
    *command, script = launch.command
    assert script == str(path), (script, path)
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"there is no {command[0]} on PATH: is this a login node? --dry-run prints the script"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    stem, numbers = path.stem, itertools.count(2)
    # another launch may be about to read its script
    while not write_new(path, text):
        path = path.with_name(f"{stem}-{next(numbers)}{path.suffix}")
    terminal.err(f"launch: wrote {path}; logs will be {launch.log}\n")
    return subprocess.run([*command, str(path)], check=False).returncode


def _run(launcher: Launcher, job: Job, special: Any, dry_run: bool) -> int:
    """Start the ranks and wait for them, with restarts."""
    assert launcher.restarts is not None
    restarts: Restarts = launcher.restarts(special)
    # before a log folder is made, so that a usage error leaves no folder
    launch = launcher.launch(job, special, os.environ)
    if dry_run:
        sys.stdout.write(shell_text(launch))
        return 0
    if (logs := claim(job.logs)) != job.logs:
        job = replace(job, logs=logs)
        launch = launcher.launch(job, special, os.environ)
    ranks = f" ({job.num_ranks} ranks)" if job.num_ranks != job.islands else ""
    terminal.err(
        f"launch: {_count_islands(job)}{ranks} by {launch.command[0]}; a log for each rank in {job.logs}\n"
    )
    until = None if job.time_seconds is None else time.monotonic() + job.time_seconds

    def start(number: int) -> LaunchEnd:
        left = None if until is None else until - time.monotonic()
        if number and left is not None and left <= job.stop_seconds:
            terminal.err("launch: not started again: the time limit is near\n")
            return LaunchEnd(code=TEMPORARY_FAILURE, asked=True)
        return supervise_once(launch, job.logs, os.environ, time_seconds=left, stop_seconds=job.stop_seconds)

    return run_again(start, restarts, terminal.err)
