"""Where the rows of a file begin, found once and kept in a file that all ranks map into memory."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardtrain.system.atomic_write import new_file

OWNER_ONLY = 0o600
VERSION = 2
"""Of what counts as a row: an index of another version is not read."""

CUT_OFF = -1
"""Offset of a last row that stands for all that is lost, of a file that is damaged or cut off behind it."""


def row_offsets(path: Path, folder: Path | None, find: Callable[[Path], np.ndarray]) -> np.ndarray:
    """Return the byte offsets of a file's rows, from an index that is written at the first call.

    The index is used again while path, size and time of modification are the same.

    Args:
      path: the file.
      folder: the folder of the index; None keeps it in memory.
      find: path -> offsets, int (n, ...), where there is no index yet.

    Returns:
      What `find` returned, uint64, mapped into memory.
    """
    if folder is None:
        return find(path).astype(np.uint64)
    index = folder / f"rows-v{VERSION}-{file_digest(path)}.npy"
    try:
        return np.load(index, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        folder.mkdir(parents=True, exist_ok=True)
    offsets = find(path).astype(np.uint64)
    with new_file(index, OWNER_ONLY) as file:
        np.lib.format.write_array(file, offsets, allow_pickle=False)
    # an empty array cannot be mapped
    return np.load(index, mmap_mode="r", allow_pickle=False) if offsets.size else offsets


def remove_indices(folder: Path) -> None:
    """Delete the indices in a folder that nothing reads any more, and the folder if nothing else is in it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for index in folder.glob("rows-*.npy"):
        index.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def is_cut_off(offset: int) -> bool:
    """Return whether an offset that was read as unsigned is `CUT_OFF`."""
    return offset == CUT_OFF % 2**64


def file_digest(path: Path) -> str:
    """Return a hash of a file's path, size and time of modification."""
    found = os.stat(path)
    return hashlib.sha256(f"{path.absolute()} {found.st_size} {found.st_mtime_ns}".encode()).hexdigest()[:24]
