"""Token files: one-dimensional .npy files of integers, which numpy reads and writes too.

They are mapped into memory: only the parts in use are read. Next: `windows.py`.
"""

import fcntl
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from shardtrain.system.array_file import read_header
from shardtrain.system.atomic_write import READABLE, new_file

TOKEN_TYPES = ("uint8", "uint16", "uint32")
"""The dtypes that `write_tokens` writes. `open_tokens` reads any integers."""


def write_tokens(
    path: Path,
    documents: Iterable[ArrayLike],
    *,
    dtype: DTypeLike = "uint16",
    separator: int | None = None,
    mode: int = READABLE,
) -> int:
    """Write documents into one token file, one after the other.

    It is written under another name, then renamed, so `path` is never there in part.

    Args:
      path: the file to write; its folder is created.
      documents: integers (num_tokens,) each, read once, one at a time.
      dtype: uint8, uint16 or uint32.
      separator: the token after each document; None for no token.
      mode: the file's permissions, less the umask.

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
    ending = _as_tokens([] if separator is None else [separator], kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    num_tokens = 0
    # the number of tokens is known only at the end: write a header with 0, and then over it
    with new_file(path, mode) as file:
        _write_header(file, kind, 0)
        for document in documents:
            for tokens in (_as_tokens(document, kind), ending):
                file.write(tokens.data)
                num_tokens += len(tokens)
        # numpy leaves room in the header for any number of tokens
        file.seek(0)
        _write_header(file, kind, num_tokens)
    return num_tokens


def _write_header(file: BinaryIO, kind: np.dtype, num_tokens: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)


def _as_tokens(values: ArrayLike, kind: np.dtype) -> np.ndarray:
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


class TokenFile:
    """A token file that any number of threads read in pieces.

    It is not mapped into memory: if a mapped file is truncated or its disk fails, SIGBUS ends the process.
    It holds a shared lock, so that `unlink_unlocked` leaves the file to it.

    Args:
      path: the token file.

    Raises:
      FileNotFoundError, ValueError: see `open_tokens`.
    """

    def __init__(self, path: Path) -> None:
        tokens = open_tokens(path)
        self.path, self.num_tokens, self._dtype = path, len(tokens), tokens.dtype
        self._offset = tokens.offset
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        with suppress(OSError):  # a file system without locks, or the file is being deleted
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens `start` to `stop`, integers (stop - start,).

        Raises:
          OSError: the file was truncated, or its disk fails.
        """
        num_bytes = (stop - start) * self._dtype.itemsize
        try:
            data = os.pread(self._handle, num_bytes, self._offset + start * self._dtype.itemsize)
        except OSError as error:
            raise OSError(f"{self.path.absolute()} cannot be read: {error}; {RESTORE_HINT}") from error
        if len(data) < num_bytes:
            there = max(os.fstat(self._handle).st_size - self._offset, 0) // self._dtype.itemsize
            raise OSError(
                f"{self.path.absolute()} was cut off while it was read: it ends after {there:,} of"
                f" {self.num_tokens:,} tokens; {RESTORE_HINT}"
            )
        return np.frombuffer(data, self._dtype)

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path]]:
        return TokenFile, (self.path,)


RESTORE_HINT = "bring it back, or delete it where it was made from text, and give the same command again"
