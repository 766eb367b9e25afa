"""Read tar shards of WebDataset: files with one name and several suffixes are the fields of a row.

Not compressed. The layout: https://github.com/webdataset/webdataset#the-webdataset-format
"""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardtrain.data.sources.format import BadData, Format, Record
from shardtrain.data.sources.row_offsets import CUT_OFF, IndexedRows, read_part, row_extent
from shardtrain.data.sources.unread_files import explain_content
from shardtrain.system.excerpts import short
from shardtrain.system.plain_text import decode_text
from shardtrain.system.untrusted_data import parse_record
from shardtrain.system.untrusted_files import open_regular

TEXTS = ("txt", "text", "caption")
NUMBERS = ("cls", "cls2", "index", "inx", "id")
"""Suffixes of files that are whole numbers as text."""

BLOCK_BYTES = 512

MOST_HEADER_BYTES = 1 << 20
"""Largest number of bytes of a header, which has a name or attributes."""

DAMAGED = (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError, MemoryError)
"""Errors that `tarfile` raises for a damaged file."""


class _Headers:
    """A file from which `tarfile` reads only headers: larger reads are refused."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, num_bytes: int) -> bytes:
        if not 0 <= num_bytes <= MOST_HEADER_BYTES:
            raise tarfile.ReadError(
                f"a header has {num_bytes:,} bytes, at most {MOST_HEADER_BYTES:,} are read"
            )
        return self._file.read(num_bytes)


def read_members(file: BinaryIO, stop: int) -> Iterator[tarfile.TarInfo]:
    """Yield the files in a tar file from its position up to `stop`; the last one may be cut off.

    Raises:
      `DAMAGED`: a header is damaged.
    """
    with tarfile.open(fileobj=_Headers(file), mode="r:") as tar:  # type: ignore[call-overload]
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]
            if member.issparse() or not member.size >= 0:
                kind = "is sparse" if member.issparse() else f"has {member.size} bytes"
                raise tarfile.ReadError(f"{short(member.name)} {kind}")
            yield member
            # later headers may be damaged
            if find_end(member) >= stop:
                return


def find_end(member: tarfile.TarInfo) -> int:
    """Return the end of the blocks of a file in a tar file."""
    return member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES


def split_name(name: str) -> tuple[str, str]:
    """Return a file's key, which the files of a row share, and its suffix from the first dot of its name on.

    >>> split_name("train/0001.seg.png"), split_name("0001.TXT")
    (('train/0001', 'seg.png'), ('0001', 'txt'))
    """
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return folder + slash + stem, ending.lower()


def find_group_offsets(path: Path) -> np.ndarray:
    """Return (start, stop) of each row's files with their headers, int (n, 2), in bytes.

    For a file that is cut off, the last row is `CUT_OFF` and the position up to which the file is complete.

    Raises:
      BadData: the file is compressed, no tar file, or cut off within the first file in it.
    """
    rows: list[list[int]] = []
    last_key, stop, whole = None, 0, False
    num_bytes = path.stat().st_size
    try:
        with open_regular(path) as file:
            for member in read_members(file, num_bytes):
                end = find_end(member)
                key, ending = split_name(member.name)
                if end > num_bytes:
                    rows = rows[:-1] if key == last_key else rows
                    break
                stop = end
                if not member.isfile() or not ending:
                    last_key = None
                elif key == last_key:
                    rows[-1][1] = stop
                else:
                    rows.append([member.offset, stop])
                    last_key = key
            # a block of zeros ends a tar file; one that was cut off between two files lacks it
            file.seek(stop)
            whole = file.read(BLOCK_BYTES) == bytes(BLOCK_BYTES)
    except DAMAGED as error:
        if not rows:
            with open_regular(path) as file:
                known = explain_content(file.read(BLOCK_BYTES))
            raise BadData(path, known or f"it is no whole tar file ({error})") from None
    if not whole:
        if not rows:
            raise BadData(path, f"it ends within its first row, after {num_bytes:,} bytes")
        rows.append([CUT_OFF, stop])
    return np.array(rows, np.int64).reshape(-1, 2)


class TarRows(IndexedRows):
    """The rows of a tar file, located by an index of the start and stop of each row's files."""

    find = staticmethod(find_group_offsets)

    def read(self, row: int) -> Record:
        start, stop = row_extent(self._offsets, row, self.path)
        found: dict[str, Any] = {}
        try:
            with open_regular(self.path) as file:
                if start % BLOCK_BYTES or start > stop or stop > os.fstat(file.fileno()).st_size:
                    raise BadData(self.path, "its index is wrong, or the file was cut off", row)
                file.seek(start)
                for member in read_members(file, stop):
                    if member.isfile():
                        content = read_part(self.path, member.offset_data, member.size, row)
                        found |= self._field(member, content, row)
        except DAMAGED as error:
            if isinstance(error, BadData):
                raise
            raise BadData(self.path, f"its files cannot be read ({error})", row) from None
        return found

    def _field(self, member: tarfile.TarInfo, content: bytes, row: int) -> dict[str, Any]:
        key, ending = split_name(member.name)
        last = ending.rpartition(".")[2]
        try:
            if last in TEXTS:
                return {"__key__": key, "text" if ending in TEXTS else ending: decode_text(content)}
            if last in NUMBERS:
                return {"__key__": key, ending: int(decode_text(content))}
            if last == "json":
                return {"__key__": key, ending: parse_record(content)}
        except ValueError as error:
            raise BadData(self.path, f"{member.name} is no {last} ({error})", row) from None
        return {"__key__": key, ending: content}


FORMAT = Format(summary="tar shards as WebDataset writes them", suffixes=(".tar",), rows=TarRows)
