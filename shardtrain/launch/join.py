"""What `launch` needs to know of an elastic run, old or new: its command, and whether it can start it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardtrain.elastic.command_file import COMMAND, read_command
from shardtrain.elastic.epoch_files import read_newest
from shardtrain.elastic.history import get_count, list_members
from shardtrain.elastic.options import Elastic
from shardtrain.errors.messages import refuse
from shardtrain.islands.network import LOOPBACK, LOOPBACK_ADDRESS
from shardtrain.launch.job import Job

JOIN = "shardtrain launch --join RUN_FOLDER"


def add_command(job: Job, run_folder: Path, *, here: bool) -> Job:
    """Return a job whose islands join a run, with the command that the run's folder holds.

    Args:
      job: its arguments are further options of `train`.
      run_folder: the folder of the run.
      here: whether the islands run on this machine; without an interface they get loopback if the run has it.

    Raises:
      ValueError: the folder has no elastic run, or the file of its command cannot be read.
      PermissionError: the file is another user's.
    """
    elastic = run_folder / "elastic"
    try:
        command = read_command(elastic)
    except FileNotFoundError:
        raise ValueError(
            f"{run_folder} is no run that can be joined: it has no elastic/{COMMAND}, which `train --elastic`"
            " writes. Give the --run-dir of such a run, or begin one: shardtrain launch --elastic 2..5"
            " --islands 2 -- train RUN"
        ) from None
    # it starts a run file, which is code
    if (owner := (elastic / COMMAND).stat().st_uid) != os.geteuid():
        raise PermissionError(
            f"{elastic / COMMAND} is of user {owner}, and its command would run as user {os.geteuid()}; start"
            f" the islands by the command itself: train ... --run-dir {run_folder}"
        )
    if job.arguments[:1] and not job.arguments[0].startswith("-"):
        raise ValueError(
            f"after -- come further options of train, and {job.arguments[0]!r} is none; the command of the"
            f" run is in {elastic / COMMAND}"
        )
    given = _drop_run_dir([*command.arguments, *job.arguments])
    arguments = ("train", *given, "--run-dir", str(run_folder.resolve()))
    folder = Path(command.folder)
    return replace(
        job,
        arguments=arguments,
        folder=folder if folder.is_dir() else None,
        interface=job.interface or (_find_interface(elastic) if here else None),
    )


def find_processes(run_folder: Path) -> int:
    """Return the number of processes of the island that joined a run last."""
    members = list_members(run_folder / "elastic").values()
    return get_count(max(members, key=lambda facts: facts.get("started", 0.0), default={}), "processes")


def _drop_run_dir(words: Sequence[str]) -> list[str]:
    kept, rest = list[str](), iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != "--run-dir":
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept


def _find_interface(elastic: Path) -> str | None:
    """Return loopback if the members of a run use it; None if hosts may have several."""
    epoch = read_newest(elastic)
    members = epoch.members if epoch else ()
    return LOOPBACK if all(LOOPBACK_ADDRESS in member.address for member in members) else None


def check_elastic(job: Job, islands: str | None, launcher: str, *, can_start: bool) -> None:
    """Check that a launcher can start the elastic islands of a job.

    Args:
      job: its islands.
      islands: the value of --elastic; None if the run's command or file has it.
      launcher: name of the launcher.
      can_start: whether the launcher starts elastic islands.

    Raises:
      ValueError: lists why it cannot.
    """
    problems = []
    elastic = Elastic(islands=islands or "")
    if elastic.most and job.islands > elastic.most:
        problems.append(
            f"--islands is {job.islands}, and at most {elastic.most} train together; use --islands"
            f" {elastic.most}, or --elastic {elastic.fewest}..{job.islands}"
        )
    if not isinstance(job.processes_per_island, int):
        problems.append(
            f"--processes-per-island is {job.processes_text}, and elastic islands that are started together"
            " have as many each; use one number"
        )
    if job.hosts:
        names = ",".join(host.name for host in job.hosts)
        problems.append(f"hosts are {names}; start the islands on each host: {JOIN}")
    elif not can_start:
        problems.append(
            f"launch {launcher} starts ranks of MPI; use launch slurm, or start the islands on each host:"
            f" {JOIN}"
        )
    refuse("these elastic islands cannot be launched", problems)
