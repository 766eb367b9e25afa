"""The command of an elastic run, kept in its folder: what new islands and a replay start again."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain.elastic.messages import from_json, to_json
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.untrusted_files import read_json

COMMAND = "command.json"
MOST_COMMAND_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line.

    Args:
      arguments: the words after `train`.
      folder: where it was started; its paths may be relative to it.
    """

    arguments: tuple[str, ...]
    folder: str


def write_command(folder: Path, arguments: Sequence[str]) -> None:
    """Keep the command of a run, in place of an earlier one.

    Args:
      folder: `RUN/elastic`, which exists.
      arguments: the words after `train`.
    """
    command = Command(arguments=tuple(arguments), folder=os.getcwd())
    replace_file(folder / COMMAND, json.dumps(to_json(command), indent=1).encode() + b"\n")


def read_command(folder: Path) -> Command:
    """Return the command of a run.

    Args:
      folder: `RUN/elastic`.

    Raises:
      FileNotFoundError: the run has none, because a loop of one's own trained it.
      ValueError: the file has another form.
    """
    return from_json(read_json(folder / COMMAND, MOST_COMMAND_BYTES), Command, COMMAND)
