"""A file with the current step of a rank, which remains however the rank ends: mapped memory, no writes.

The keeper of a rank (`launch/rank.py`) names the file; restarts read from it whether the same step
failed twice.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

STEP_FILE = "SHARDTRAIN_STEP_FILE"
"""The variable of the environment with its path."""

LAYOUT = struct.Struct("<qq")


class LastStep(NamedTuple):
    """The last record of a rank's step file.

    Args:
      step: the one that it was doing, from 1; 0 before the first.
      hung: whether its watchdog ended it.
    """

    step: int
    hung: bool


NOTHING = LastStep(0, False)
"""The record of a rank without a step file."""


class StepFile:
    """The step file of this rank.

    Args:
      path: created, or truncated.

    Raises:
      OSError: it cannot be made, or not be mapped.
    """

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        try:
            os.ftruncate(file, LAYOUT.size)
            self._memory = mmap.mmap(file, LAYOUT.size)
        finally:
            os.close(file)
        self._last = NOTHING

    def write_step(self, step: int) -> None:
        """Write the step that begins, from 1."""
        self._write(self._last._replace(step=step))

    def write_hung(self) -> None:
        """Write that the watchdog ends this rank."""
        self._write(self._last._replace(hung=True))

    def _write(self, last: LastStep) -> None:
        self._last = last
        LAYOUT.pack_into(self._memory, 0, *last)


def read_step_file(path: Path) -> LastStep:
    """Return the last record of a rank's step file."""
    try:
        step, hung = LAYOUT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return NOTHING
    return LastStep(step, bool(hung))
