"""Parquet and Arrow files, such as those of a Hugging Face `datasets` folder; all that imports pyarrow.

Rows are read a row group, or a record batch, at a time; the last one read is kept for each thread.
"""

import io
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardtrain.data.sources.format import BadData, Format, Record

EXTRA = ("pyarrow", "arrow")


class Columns:
    """The rows of a file of columns, in groups.

    Args:
      path: the file.
      sizes: number of rows of each group.
      load: number of a group -> a pyarrow table or record batch.
    """

    def __init__(self, path: Path, sizes: list[int], load: Callable[[int], Any]) -> None:
        self._path, self._load = path, load
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._last = threading.local()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, row: int) -> Record:
        if not 0 <= row < len(self):
            raise IndexError(row)
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        if getattr(self._last, "group", None) != group:
            self._last.table, self._last.group = self._table(group, row), group
        return self._row(self._last.table, row - int(self._starts[group]), row)

    def iterate(self, start: int, stop: int | None) -> Iterator[tuple[int, Record | BadData]]:
        row, stop = start, len(self) if stop is None else stop
        while row < stop:
            try:
                yield row, self.read(row)
                row += 1
            except BadData as error:
                yield row, error
                # a group that cannot be read is reported once
                group = int(np.searchsorted(self._starts, row, "right")) - 1
                row = row + 1 if self._has(group) else int(self._starts[group + 1])

    def _has(self, group: int) -> bool:
        return getattr(self._last, "group", None) == group

    def _table(self, group: int, row: int) -> Any:
        try:
            return self._load(group)
        except Exception as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise BadData(
                self._path, f"row group {group} cannot be read ({first_line(error)})", row
            ) from None

    def _row(self, table: Any, index: int, row: int) -> Record:
        try:
            return {name: table.column(name)[index].as_py() for name in table.schema.names}
        except UnicodeDecodeError as error:
            raise BadData(self._path, f"a text is not UTF-8 at its byte {error.start:,}", row) from None


def open_parquet(path: Path, folder: Path | None = None) -> Columns:
    """Open a Parquet file by its footer."""
    parquet = import_module("pyarrow.parquet")

    def opened() -> Any:
        # not mapped into memory: a mapped file that is truncated ends the process
        return parquet.ParquetFile(path, memory_map=False)

    path.stat()
    try:
        with opened() as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except Exception as error:
        raise BadData(path, f"it is no whole Parquet file ({first_line(error)})") from None
    handles = threading.local()

    def load(group: int) -> Any:
        if not hasattr(handles, "file"):
            handles.file = opened()
        return handles.file.read_row_group(group, use_threads=False)

    return Columns(path, sizes, load)


def open_arrow(path: Path, folder: Path | None = None) -> Columns:
    """Open an Arrow file, or an Arrow stream as `datasets` writes it."""
    pyarrow = import_module("pyarrow")
    path.stat()
    try:
        mapped = pyarrow.memory_map(str(path))
        if mapped.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(mapped)
            batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        else:
            mapped.seek(0)
            batches = list(pyarrow.ipc.open_stream(mapped))
    except Exception as error:
        raise BadData(path, f"it is no whole Arrow file ({first_line(error)})") from None
    return Columns(path, [batch.num_rows for batch in batches], lambda group: batches[group])


def open_zstd(path: Path) -> BinaryIO:
    """Open a file that is compressed by zstd, for reading."""
    pyarrow = import_module("pyarrow")
    return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")[:200]


PARQUET = Format(
    summary="Parquet", suffixes=(".parquet", ".pq"), magic=b"PAR1", rows=open_parquet, needs=EXTRA
)
ARROW = Format(
    summary="Arrow, and folders of Hugging Face datasets",
    suffixes=(".arrow", ".feather", ".ipc"),
    magic=b"ARROW1",
    rows=open_arrow,
    needs=EXTRA,
)
