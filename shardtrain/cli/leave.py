"""`shardtrain leave RUN_FOLDER [ISLAND]`: ask an island of an elastic run to leave, or list its islands."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardtrain.checkpoints.paths import CHECKPOINTS, find_finished_steps
from shardtrain.cli.arguments import parse_words
from shardtrain.elastic.epoch import Epoch
from shardtrain.elastic.epoch_files import list_epochs
from shardtrain.elastic.run_files import RunFiles
from shardtrain.errors.messages import near
from shardtrain.system import terminal
from shardtrain.system.excerpts import short

SILENT_SECONDS = 10.0
"""An island that shows no sign of life for longer may be gone; a living one shows one every second."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of leave.

    Args:
      run_folder: the folder of the run.
      island: its name, or the beginning of its name. None lists the islands, oldest first.
    """

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_FOLDER")]
    island: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="ISLAND")] = None


def main(arguments: Sequence[str]) -> int:
    """Ask an island to leave: it finishes its step, and the others repeat nothing; return 0.

    Raises:
      ValueError: the folder has no elastic run, or the run has no such island, or is done.
    """
    options = parse_words(
        Options,
        list(arguments),
        prog="shardtrain leave",
        description="Ask an island of an elastic run to leave after its step, or list the islands.",
    )
    folder = options.run_folder / "elastic"
    # looked for first: `RunFiles` makes the folders
    epochs = list_epochs(files := RunFiles(folder)) if (folder / "epochs").is_dir() else []
    if not epochs:
        raise ValueError(
            f"{options.run_folder} has no run of elastic islands, which has files {folder}/epochs/N.json;"
            " give the --run-dir of a run with --elastic"
        )
    if text := _find_end(options.run_folder, files, epochs[-1]):
        if options.island is not None:
            raise ValueError(f"there is no island {short(options.island)}: {text}")
        terminal.out(f"{text}\n")
        return 0
    if options.island is None:
        names = epochs[-1].names
        for name in names:
            chief = "  chief" if name == names[0] else ""
            terminal.out(f"{name}{chief}{_format_silence(files, name)}\n")
        return 0
    name = find_member(options.island, epochs)
    files.ask_to_leave(name)
    terminal.out(f"{name} is asked to leave{_format_silence(files, name)}\n")
    return 0


def find_member(text: str, epochs: Sequence[Epoch]) -> str:
    """Return the name of the member of the newest epoch that begins with a text.

    Raises:
      ValueError: there is none, or several.
    """
    names = epochs[-1].names
    found = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{text!r} begins the names of {len(found)} islands; give one of {', '.join(found)}")
    for before, after in zip(reversed(epochs[:-1]), reversed(epochs[1:]), strict=True):
        if gone := [name for name in before.names if name.startswith(text)]:
            raise ValueError(f"{gone[0]} is not in the run any more, since epoch {after.number}: {after.why}")
    raise ValueError(f"there is no island {near(text, names)}")


def _find_end(run_folder: Path, files: RunFiles, newest: Epoch) -> str:
    """Return how a run has ended; "" if it has islands, or all of them were lost."""
    saved = [
        *find_finished_steps(run_folder / CHECKPOINTS),
        *(each.step for each in files.list_checkpoints()),
    ]
    if 0 < newest.num_steps <= max(saved, default=0):
        return f"the run is done: its {newest.num_steps} steps are saved, and it has no islands any more"
    if newest.stops:
        return f"the run was stopped after step {newest.step}; an island that is started now continues it"
    return ""


def _format_silence(files: RunFiles, name: str) -> str:
    silent = files.idle_seconds(name)
    # one that has just joined has shown none yet
    return f"  (no sign of life for {silent:.0f} s)" if SILENT_SECONDS < silent < math.inf else ""
