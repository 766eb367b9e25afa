"""Create the log folder of a launch exclusively, so that two launches never share one."""

import itertools
import os
import socket
from pathlib import Path

OWNER = "launch.txt"
"""File with the launching process and its host; the launch that creates it owns the folder."""

ASKED = "asked"
"""File with the signal that the launch received; ranks get SIGUSR1, which every mpiexec forwards."""


def claim(folder: Path) -> Path:
    """Claim a log folder, under another name if another launch has claimed it: logs, logs-2, logs-3.

    Args:
      folder: the preferred folder; it may exist and hold anything but the logs of a launch.

    Returns:
      The folder, which only this process uses; its content is unchanged.

    Raises:
      OSError: it cannot be created.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     [claim(Path(root, "logs")).name for _ in range(3)]
    ['logs', 'logs-2', 'logs-3']
    """
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        candidate.mkdir(parents=True, exist_ok=True)
        if not any(candidate.glob("rank-*")) and write_new(
            candidate / OWNER, f"{socket.gethostname()} {os.getpid()}\n"
        ):
            return candidate
    raise AssertionError("numbers have no end")


def write_new(path: Path, text: str) -> bool:
    """Create a file; return False if it exists already."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True
