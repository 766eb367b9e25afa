"""Tar shards as WebDataset writes them: files of one name and several endings are the fields of a row.

Not compressed. The layout: https://github.com/webdataset/webdataset#the-webdataset-format
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.data.sources.format import BadData, Format, Record, iterate_rows
from shardtrain.data.sources.row_offsets import CUT_OFF, is_cut_off, row_offsets
from shardtrain.data.sources.unread_files import content_problem
from shardtrain.system.plain_text import decode_text

TEXTS = ("txt", "text", "caption")
NUMBERS = ("cls", "cls2", "index", "inx", "id")
"""Endings whose files are whole numbers as text."""

BLOCK_BYTES = 512


class TarRows:
    """The rows of a tar file, found by an index of where the files of each row begin and end."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self._path = path
        self._offsets = row_offsets(path, folder, group_offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, row: int) -> Record:
        start, stop = map(int, self._offsets[row])
        if is_cut_off(start):
            why = f"the file is damaged, or ends, after byte {stop:,}; all that follows is lost"
            raise BadData(self._path, why, row)
        found: dict[str, Any] = {}
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    while (member := tar.next()) is not None and member.offset < stop:
                        if member.isfile():
                            found |= self._field(tar, member, row)
        except (tarfile.TarError, OSError) as error:
            raise BadData(self._path, f"its files cannot be read ({error})", row) from None
        return found

    def iterate(self, start: int, stop: int | None) -> Iterator[tuple[int, Record | BadData]]:
        return iterate_rows(self, start, stop)

    def _field(self, tar: tarfile.TarFile, member: tarfile.TarInfo, row: int) -> dict[str, Any]:
        key, ending = split_name(member.name)
        file = tar.extractfile(member)
        assert file is not None
        content = file.read()
        if len(content) < member.size:
            raise BadData(self._path, f"{member.name} is cut off", row)
        last = ending.rpartition(".")[2]
        try:
            if last in TEXTS:
                return {"__key__": key, "text" if ending in TEXTS else ending: decode_text(content)}
            if last in NUMBERS:
                return {"__key__": key, ending: int(decode_text(content))}
            if last == "json":
                return {"__key__": key, ending: json.loads(decode_text(content))}
        except (ValueError, RecursionError) as error:
            raise BadData(self._path, f"{member.name} is no {last} ({error})", row) from None
        return {"__key__": key, ending: content}


def split_name(name: str) -> tuple[str, str]:
    """Return a file's key, which the files of a row share, and its ending from the first dot of its name on.

    >>> split_name("train/0001.seg.png"), split_name("0001.TXT")
    (('train/0001', 'seg.png'), ('0001', 'txt'))
    """
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return folder + slash + stem, ending.lower()


def group_offsets(path: Path) -> np.ndarray:
    """Return (start, stop) of each row's files with their headers, int (n, 2), in bytes.

    Of a file that is cut off the last row is `CUT_OFF` and the position up to which it is whole.

    Raises:
      BadData: the file is compressed, no tar file, or cut off within the first file in it.
    """
    rows: list[list[int]] = []
    last_key, stop, whole = None, 0, False
    num_bytes = path.stat().st_size
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]
                end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
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
    except tarfile.TarError as error:
        if not rows:
            with path.open("rb") as file:
                known = content_problem(file.read(BLOCK_BYTES))
            raise BadData(path, known or f"it is no whole tar file ({error})") from None
    if not whole:
        if not rows:
            raise BadData(path, f"it ends within its first row, after {num_bytes:,} bytes")
        rows.append([CUT_OFF, stop])
    return np.array(rows, np.int64).reshape(-1, 2)


FORMAT = Format(summary="tar shards as WebDataset writes them", suffixes=(".tar",), rows=TarRows)
