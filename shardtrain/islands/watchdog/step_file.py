"""Record the current step of a rank in mapped memory of a file, which survives however the rank ends.

The keeper of a rank (`launch/rank.py`) names the file; restarts read it to see whether the same step failed
twice.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

STEP_FILE = "SHARDTRAIN_STEP_FILE"
"""Environment variable with the path of the file."""

LAYOUT = struct.Struct("<qq")


class LastStep(NamedTuple):
    """The last record of a rank's step file.

    Args:
      step: its latest step, from 1; 0 before the first.
      hung: whether its watchdog ended it.
    """

    step: int
    hung: bool


NOTHING = LastStep(0, False)
"""The record of a rank without a step file."""


class StepFile:
    """The step file of this rank.

    Args:
      path: the file, which is created or truncated.

    Raises:
      OSError: the file cannot be created or mapped.
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
