"""Index the rows of a file: find their offsets once, and store them in a file that all ranks read."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardtrain.data.sources.format import BadData, Rows
from shardtrain.system.array_file import read_header
from shardtrain.system.atomic_write import new_file
from shardtrain.system.untrusted_files import open_regular

OWNER_ONLY = 0o600
VERSION = 2
"""Version of the definition of a row: an index of another version is not read."""
PAIR_BYTES = 16
BLOCK_ROWS = 512
"""Number of rows whose offsets are read together and kept."""

MOST_ROW_BYTES = (1 << 31) - 1
"""Largest number of bytes of a row, which a single system call can read."""

CUT_OFF = -1
"""Offset of an additional last row that represents the lost rest of a damaged or truncated file."""


class RowOffsets:
    """The offsets of a file's rows, which are read from their index when they are needed.

    The index is not mapped into memory, and not trusted: it may be damaged, or come with a run folder.

    Args:
      index: the index file.
      path: the file of the rows.

    Raises:
      OSError, ValueError: there is no such file, or it is no index.
    """

    def __init__(self, index: Path, path: Path) -> None:
        dtype, shape, self._offset = read_header(index)
        if dtype != np.uint64 or len(shape) != 2 or shape[1] != 2:
            raise ValueError(f"{index} has {dtype} of shape {shape}; an index has uint64 of shape (rows, 2)")
        self._index, self._path, self._num_rows = index, path, shape[0]
        self._block = 0, np.empty((0, 2), np.uint64)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> tuple[int, int]:
        if not 0 <= row < self._num_rows:
            raise IndexError(row)
        first, block = self._block  # one assignment, as other threads read too
        if not 0 <= row - first < len(block):
            first = row - row % BLOCK_ROWS
            with open_regular(self._index) as file:
                file.seek(self._offset + first * PAIR_BYTES)
                block = np.fromfile(file, "<u8", 2 * BLOCK_ROWS)
            block = block[: len(block) // 2 * 2].reshape(-1, 2)
            self._block = first, block
        if not row - first < len(block):
            raise BadData(self._path, f"its index {self._index} was cut off; delete the index", row)
        start, stop = block[row - first]
        return int(start), int(stop)


class IndexedRows(Rows):
    """The rows of a file, located by an index of their offsets, which `find` finds."""

    find: Callable[[Path], np.ndarray]

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self._offsets = row_offsets(path, folder, type(self).find)

    def __len__(self) -> int:
        return len(self._offsets)


def row_offsets(
    path: Path, folder: Path | None, find: Callable[[Path], np.ndarray]
) -> RowOffsets | np.ndarray:
    """Return the byte offsets of a file's rows, from an index that is written at the first call.

    The index is reused while path, size and time of modification are the same.

    Args:
      path: the file.
      folder: the folder for the index; None keeps the offsets in memory.
      find: path -> offsets, int (n, 2); called if there is no index yet.

    Returns:
      The result of `find`, as unsigned integers.
    """
    if folder is None:
        return find(path).astype(np.uint64)
    index = folder / f"rows-v{VERSION}-{file_digest(path)}.npy"
    try:
        return RowOffsets(index, path)
    except (OSError, ValueError):
        folder.mkdir(parents=True, exist_ok=True)
    with new_file(index, OWNER_ONLY) as file:
        np.lib.format.write_array(file, find(path).astype("<u8"), allow_pickle=False)
    return RowOffsets(index, path)


def read_part(path: Path, start: int, num_bytes: int, row: int) -> bytes:
    """Read the bytes of a row.

    Raises:
      BadData: the file has fewer, or the row is too large.
    """
    with open_regular(path) as file:
        end = os.fstat(file.fileno()).st_size
        if not 0 <= num_bytes <= MOST_ROW_BYTES:
            raise BadData(path, f"the row has {num_bytes:,} bytes, at most {MOST_ROW_BYTES:,} are read", row)
        if start + num_bytes > end:
            raise BadData(path, "the file was cut off since its rows were found, or its index is wrong", row)
        return os.pread(file.fileno(), num_bytes, start)


def remove_indices(folder: Path) -> None:
    """Delete the indices in a folder, and the folder if it is empty then."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for index in folder.glob("rows-*.npy"):
        index.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def row_extent(offsets: RowOffsets | np.ndarray, row: int, path: Path) -> tuple[int, int]:
    """Return both offsets of a row.

    Raises:
      BadData: the row represents the lost rest of the file.
    """
    start, stop = map(int, offsets[row])
    if start == CUT_OFF % 2**64:  # it was read as unsigned
        why = f"the file is damaged, or ends, after byte {stop:,}; all that follows is lost"
        raise BadData(path, why, row)
    return start, stop


def file_digest(path: Path) -> str:
    """Return a hash of a file's path, size and time of modification."""
    found = os.stat(path)
    return hashlib.sha256(f"{path.absolute()} {found.st_size} {found.st_mtime_ns}".encode()).hexdigest()[:24]
