"""Read and write token files: one-dimensional .npy files of integers, as numpy has them.

`TokenShards` reads the tokens of many files as one sequence. Next: `windows.py`.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from shardtrain.system.array_file import read_header
from shardtrain.system.atomic_write import READABLE, new_file

TOKEN_TYPES = ("uint8", "uint16", "uint32")
"""The dtypes that `write_tokens` writes. `open_tokens` reads any integers."""

RESTORE_HINT = "bring it back, or delete it where it was made from text, and give the same command again"
MOST_OPEN = 64
"""Largest number of files that are kept open: a process may have a thousand, for all purposes."""


def write_tokens(
    path: Path,
    documents: Iterable[ArrayLike],
    *,
    dtype: DTypeLike = "uint16",
    separator: int | None = None,
    mode: int = READABLE,
) -> int:
    """Write documents into one token file, one after the other.

    The file is written under another name and then renamed, so `path` is never an unfinished file.

    Args:
      path: the file to write; its folder is created.
      documents: integers (num_tokens,) each, read once, one at a time.
      dtype: uint8, uint16 or uint32.
      separator: the token after each document; None means no token.
      mode: the permissions of the file, before the umask.

    Returns:
      The number of tokens in the file.

    Raises:
      ValueError: another dtype, a document that is not a 1D array of integers, or a token that does not fit.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "tokens.npy"
    >>> write_tokens(file, [[5, 6], [7]], separator=0)
    5
    >>> open_tokens(file).tolist()
    [5, 6, 0, 7, 0]
    """
    kind = np.dtype(dtype)
    if kind.name not in TOKEN_TYPES:
        raise ValueError(f"a token file of {kind.name} was asked for; use one of {', '.join(TOKEN_TYPES)}")
    ending = _convert_tokens([] if separator is None else [separator], kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    num_tokens = 0
    # the number of tokens is known only at the end: write a header with 0, and then over it
    with new_file(path, mode) as file:
        _write_header(file, kind, 0)
        for document in documents:
            for tokens in (_convert_tokens(document, kind), ending):
                file.write(tokens.data)
                num_tokens += len(tokens)
        # numpy leaves room in the header for any number of tokens
        file.seek(0)
        _write_header(file, kind, num_tokens)
    return num_tokens


def _write_header(file: BinaryIO, kind: np.dtype, num_tokens: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)


def _convert_tokens(values: ArrayLike, kind: np.dtype) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"a document is {array.dtype.name} of shape {array.shape}; use a 1D array of integers"
        )
    worst = 0 if array.size == 0 else int(array.min()) if array.min() < 0 else int(array.max())
    if not 0 <= worst <= np.iinfo(kind).max:
        # name the smallest type that holds the token, as the change to make
        fitting = [name for name in TOKEN_TYPES if 0 <= worst <= np.iinfo(name).max]
        change = f"use dtype {fitting[0]}" if fitting else "use tokens from 0 to 2**32 - 1"
        raise ValueError(f"token {worst} does not fit in {kind.name} (0 to {np.iinfo(kind).max}); {change}")
    return np.ascontiguousarray(array.astype(kind, copy=False))


def open_tokens(path: Path) -> np.memmap:
    """Map a token file into memory, read-only.

    Returns:
      Integers (num_tokens,).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a one-dimensional .npy file of integers, or it is truncated.
    """
    try:
        dtype, shape, offset = read_header(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no token file {path.absolute()}; make it with write_tokens"
        ) from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a token file ({error}); use write_tokens") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"{path} holds {dtype.name} of shape {shape}; a token file is 1D, of integers")
    return np.memmap(path, dtype, "r", offset, shape)


class TokenArray(NamedTuple):
    """The position of an array of tokens in a file.

    Attributes:
      path: the file.
      dtype: the dtype of a token.
      offset: number of bytes before the first token.
      num_tokens: number of tokens.
      ends: a function that reads the number of tokens up to the end of each document, int (num_documents,);
        None means that the ends are not known.
    """

    path: Path
    dtype: np.dtype
    offset: int
    num_tokens: int
    ends: Callable[[], np.ndarray] | None = None


def token_file(path: Path) -> "TokenShards":
    """Open one token file for reading in pieces.

    Raises:
      FileNotFoundError, ValueError: see `open_tokens`.
    """
    tokens = open_tokens(path)
    return TokenShards([TokenArray(path, tokens.dtype, tokens.offset, len(tokens))])


class TokenShards:
    """The tokens of several files as one sequence, which any number of threads may read.

    Files are not mapped into memory: if a mapped file is truncated or its disk fails, SIGBUS ends the
      process.

    Args:
      arrays: the files.
    """

    def __init__(self, arrays: Sequence[TokenArray]) -> None:
        self._arrays = arrays = tuple(arrays)
        self._starts = np.concatenate([[0], np.cumsum([each.num_tokens for each in arrays], dtype=np.int64)])

        def read_ends(number: int) -> np.ndarray:
            read = arrays[number].ends
            return np.empty(0, np.int64) if read is None else read()

        # a file that a thread still reads is closed after that
        self._handle = lru_cache(MOST_OPEN)(lambda number: _OpenTokens(arrays[number]))
        self._ends = lru_cache(MOST_OPEN)(read_ends)

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
        """The first file that does not say where its documents end; None if all do."""
        return next((array.path for array in self._arrays if array.ends is None), None)

    def ends_in(self, start: int, stop: int) -> np.ndarray:
        """Return the ends e of documents with `start` <= e < `stop`; token e - 1 is the last of a document.

        Returns:
          Rising, int64 (n,); without the documents of files whose ends are not known.
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

    def __reduce__(self) -> tuple[type["TokenShards"], tuple[tuple[TokenArray, ...]]]:
        return TokenShards, (self._arrays,)


class _OpenTokens:
    """An open token file, which is closed when nothing refers to it."""

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
        num_bytes = (stop - start) * dtype.itemsize
        try:
            data = os.pread(self._file, num_bytes, offset + start * dtype.itemsize)
        except OSError as error:
            raise OSError(f"{path.absolute()} cannot be read: {error}; {RESTORE_HINT}") from error
        if len(data) < num_bytes:
            there = max(os.fstat(self._file).st_size - offset, 0) // dtype.itemsize
            raise OSError(
                f"{path.absolute()} was cut off while it was read: it ends after {there:,} of {num_tokens:,}"
                f" tokens; {RESTORE_HINT}"
            )
        return np.frombuffer(data, dtype)


def find_outside(tokens: np.ndarray, vocab: int) -> int | None:
    """Return the index of the first token that is negative or not below `vocab`; None if all are tokens.

    >>> find_outside(np.array([3, 9, 12]), 9)
    1
    """
    if not tokens.size or (tokens.max() < vocab and (tokens.dtype.kind == "u" or tokens.min() >= 0)):
        return None
    return int(np.flatnonzero((tokens < 0) | (tokens >= vocab))[0])


def check_tokens(tokens: np.ndarray, vocab: int, place: Callable[[int], str]) -> None:
    """Check that tokens are in a vocabulary.

    Args:
      tokens: integers, of any shape.
      vocab: size of the vocabulary.
      place: index in the flattened tokens -> where that token is, for the message.

    Raises:
      ValueError: one is negative, or not below `vocab`.
    """
    if (found := find_outside(tokens, vocab)) is not None:
        token = int(tokens.ravel()[found])
        if token < 0:
            raise ValueError(
                f"{place(found)}, is {token}, and tokens are numbers from 0 to {vocab - 1}; write the file"
                " again without it"
            )
        raise ValueError(
            f"{place(found)}, is {token}, which is not below vocab {vocab}; set vocab (vocab_size of a"
            f" corpus) to {token + 1} or more"
        )
