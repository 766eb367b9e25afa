"""Name, create and check the private folder of a run on a fast disk shared by many runs. No jax.

Two runs never share a folder, and a folder of another user is not used. Next: `retention.py`.
"""

import hashlib
import os
import re
import stat
from pathlib import Path

from shardtrain.system.atomic_write import replace_file
from shardtrain.system.untrusted_files import kind_text, read_bytes

OWNER = "run.txt"
"""File in the folder with the path of its run folder."""

PRIVATE = 0o700
MOST_PATH_BYTES = 1 << 16


def name_fast_folder(disk: Path, folder: Path) -> Path:
    """Return the unique folder on a fast disk for a run's checkpoints.

    >>> [name_fast_folder(Path("/fast"), Path(folder)).name for folder in ("/r/a/b", "/r/a-b")]
    ['r-a-b-59dc871f5ecc4d64', 'r-a-b-81caf8072b02ad4d']
    """
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(folder.parts[-3:])).strip("-")[-60:]
    return disk / f"{stem}-{digest}"


def claim(fast: Path, folder: Path) -> None:
    """Create the folder on the fast disk, or check the existing one.

    Args:
        fast: see `name_fast_folder`.
        folder: the run's.

    Raises:
        ValueError: the folder is a link, open to other users, or belongs to another user or run.
        OSError: it cannot be made.
    """
    fast.parent.mkdir(parents=True, exist_ok=True)
    try:
        fast.mkdir(PRIVATE)
    except FileExistsError:
        check(fast, folder)
    if not (fast / OWNER).exists():
        replace_file(fast / OWNER, os.fsencode(folder))


def check(fast: Path, folder: Path) -> None:
    """Refuse a folder on the fast disk that is not this run's own.

    Raises:
        ValueError: as `claim`.
        OSError: it cannot be read.
    """
    if problem := _find_problem(fast, fast.lstat(), folder):
        raise ValueError(
            f"checkpoints would go to {fast} first, but {problem}. Remove it, or give another"
            " --checkpoints.fast"
        )


def _find_problem(fast: Path, found: os.stat_result, folder: Path) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return f"it is {kind_text(found.st_mode)}, not a folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    if found.st_mode & ~PRIVATE & 0o777:
        mode = stat.S_IMODE(found.st_mode)
        return f"others may use it: its mode is {mode:o}; chmod 700 it, if you trust what is in it"
    if not (fast / OWNER).exists():
        return "" if next(fast.iterdir(), None) is None else f"it has no {OWNER} with its owner"
    owner = read_bytes(fast / OWNER, MOST_PATH_BYTES)
    return "" if owner == os.fsencode(folder) else f"it belongs to the run of {os.fsdecode(owner)}"
