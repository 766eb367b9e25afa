"""Tokens of many files, read as one long sequence by any number of threads.

Opening reads headers alone; tokens are read when they are asked for. Next: `windows.py`.
"""

import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from shardtrain.data.sources.format import TokenArray
from shardtrain.data.tokens import RESTORE_HINT

MOST_OPEN = 64
"""Files that are kept open: a process may have a thousand, for all that it does."""


class TokenShards:
    """The tokens of files, one after the other.

    Args:
      arrays: the files.
    """

    def __init__(self, arrays: Sequence[TokenArray]) -> None:
        self._arrays = tuple(arrays)
        self._starts = np.concatenate([[0], np.cumsum([each.num_tokens for each in arrays], dtype=np.int64)])
        self._open: OrderedDict[int, _Handle] = OrderedDict()
        self._ends_open: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = Lock()

    @property
    def num_tokens(self) -> int:
        """The number of all tokens."""
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens `start` to `stop`, integers (stop - start,), also across files.

        Raises:
          OSError: a file is gone or was truncated, or its disk fails; it is named.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop)
        parts = []
        number = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < stop:
            end = min(stop, int(self._starts[number + 1]))
            if end > start:
                first = int(self._starts[number])
                parts.append(self._handle(number).read(start - first, end - first))
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    def place(self, token: int) -> str:
        """Return the file of a token and its number there, for messages."""
        number = int(np.searchsorted(self._starts, token, "right")) - 1
        return f"{self._arrays[number].path}, token {token - int(self._starts[number]):,}"

    @property
    def without_ends(self) -> Path | None:
        """The first file that does not say where its documents end; None: all do."""
        return next((array.path for array in self._arrays if array.ends is None), None)

    def ends_in(self, start: int, stop: int) -> np.ndarray:
        """Return where documents end: e with `start` <= e < `stop` where token e - 1 is the last of one.

        Returns:
          Rising, int64 (n,); those of files that do not say it are missing.
        """
        found = [np.empty(0, np.int64)]
        number = max(0, int(np.searchsorted(self._starts, start, "left")) - 1)
        while number < len(self._arrays) and self._starts[number] < stop:
            ends, first = self._ends(number), int(self._starts[number])
            # in the dtype of the ends: another one would convert all of them
            borders = np.array([max(0, start - first), stop - first], ends.dtype)
            inside = slice(*np.searchsorted(ends, borders))
            found.append(ends[inside].astype(np.int64) + first)
            number += 1
        return np.concatenate(found)

    def _ends(self, number: int) -> np.ndarray:
        """Return the ends of the documents of a file, which are kept for the files in use."""
        with self._lock:
            ends = self._ends_open.pop(number, None)
            if ends is None:
                find = self._arrays[number].ends
                ends = np.empty(0, np.int64) if find is None else find()
            self._ends_open[number] = ends
            while len(self._ends_open) > MOST_OPEN:
                self._ends_open.popitem(last=False)
            return ends

    def _handle(self, number: int) -> "_Handle":
        with self._lock:
            handle = self._open.pop(number, None) or _Handle(self._arrays[number])
            self._open[number] = handle
            # one that another thread still reads from is closed by its last user
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return handle

    def __reduce__(self) -> tuple[type["TokenShards"], tuple[tuple[TokenArray, ...]]]:
        return TokenShards, (self._arrays,)


class _Handle:
    """An open file of tokens, closed when nobody has it."""

    def __init__(self, array: TokenArray) -> None:
        self._array = array
        try:
            self._file = os.open(array.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(
                f"{array.path.absolute()} cannot be read: {error.strerror}; {RESTORE_HINT}"
            ) from error
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, stop: int) -> np.ndarray:
        path, dtype, offset, num_tokens, _ = self._array
        try:
            data = os.pread(self._file, (stop - start) * dtype.itemsize, offset + start * dtype.itemsize)
        except OSError as error:
            raise OSError(f"{path.absolute()} cannot be read: {error}; {RESTORE_HINT}") from error
        if len(data) < (stop - start) * dtype.itemsize:
            raise OSError(
                f"{path.absolute()} was cut off: it had {num_tokens:,} tokens, and ends before token"
                f" {stop:,}; {RESTORE_HINT}"
            )
        return np.frombuffer(data, dtype)
