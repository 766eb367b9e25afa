"""Read the epochs of a run from its folder. Next: `epoch.py`."""

from pathlib import Path

from shardtrain.elastic.epoch import Epoch
from shardtrain.elastic.messages import from_json
from shardtrain.elastic.run_files import EPOCHS, RunFiles
from shardtrain.system.untrusted_files import parse_json


def parse_epoch(content: bytes) -> Epoch:
    """Return the epoch of a file.

    Raises:
      ValueError: the file has another form.
    """
    return from_json(parse_json(content.decode()), Epoch, "epoch")


def read_epoch(files: RunFiles, number: int) -> Epoch:
    """Return an epoch of a run, which exists."""
    return parse_epoch(files.wait_for(number))


def read_newest(folder: Path) -> Epoch | None:
    """Return the newest epoch of the run with this folder of epochs and members; None if there is none."""
    # looked for first: `RunFiles` makes the folders
    files = RunFiles(folder) if (folder / EPOCHS).is_dir() else None
    newest = files.newest() if files else 0
    return read_epoch(files, newest) if files and newest else None


def find_chiefs(files: RunFiles, names: set[str], number: int) -> set[str]:
    """Return which of some islands were chiefs before an epoch."""
    found = set[str]()
    for earlier in range(number - 1, 0, -1):
        if found == names:
            break
        found |= {read_epoch(files, earlier).names[0]} & names
    return found


def list_epochs(files: RunFiles) -> list[Epoch]:
    """Return all epochs of a run, in order."""
    return [read_epoch(files, number) for number in range(1, files.newest() + 1)]
