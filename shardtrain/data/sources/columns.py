"""Parquet and Arrow files, such as those of a Hugging Face `datasets` folder; all that imports pyarrow.

A column is read a row group, or a record batch, at a time; the last one read is kept for each thread.
"""

import io
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardtrain.data.sources.format import BadData, Format, Record, iterate_rows

EXTRA = ("pyarrow", "arrow")


class Columns:
    """The rows of a file of columns, in groups; a column is read when a row is asked for it.

    Args:
      path: the file.
      sizes: number of rows of each group.
      names: of the columns.
      load: (number of a group, name of a column) -> a pyarrow array.
    """

    def __init__(
        self, path: Path, sizes: list[int], names: list[str], load: Callable[[int, str], Any]
    ) -> None:
        self.path, self.names, self._load = path, dict.fromkeys(names), load
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._last = threading.local()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, row: int) -> Record:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return _Row(self, row)

    def iterate(self, start: int, stop: int | None) -> Iterator[tuple[int, Record | BadData]]:
        return iterate_rows(self, start, stop)

    def value(self, row: int, name: str) -> Any:
        """Return a field of a row.

        Raises:
          BadData: it cannot be read, or is no value of Python.
        """
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        start, stop = map(int, self._starts[group : group + 2])
        column = self._column(group, name)
        if isinstance(column, Exception):
            why = f"row group {group} (rows {start:,} to {stop - 1:,}) cannot be read ({first_line(column)})"
            raise BadData(self.path, why, row)
        try:
            return column[row - start].as_py()
        except UnicodeDecodeError as error:
            raise BadData(self.path, f"a text is not UTF-8 at its byte {error.start:,}", row) from None
        except Exception as error:
            raise BadData(self.path, f"field {name} cannot be read ({first_line(error)})", row) from None

    def _column(self, group: int, name: str) -> Any:
        """Return a column of a group, or its error; the last of each name is kept for this thread."""
        kept = self._last.__dict__
        if name not in kept or kept[name][0] != group:
            try:
                found = self._load(group, name)
            except Exception as error:
                if isinstance(error, FileNotFoundError):
                    raise
                found = error
            kept[name] = group, found
        return kept[name][1]


class _Row(Mapping[str, Any]):
    """The fields of a row, each read when it is asked for."""

    def __init__(self, columns: Columns, row: int) -> None:
        self._columns, self._row = columns, row

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns.names:
            raise KeyError(name)
        return self._columns.value(self._row, name)

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)


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
            names = file.schema_arrow.names
    except Exception as error:
        raise BadData(path, f"it is no whole Parquet file ({first_line(error)})") from None
    handles = threading.local()

    def load(group: int, name: str) -> Any:
        if not hasattr(handles, "file"):
            handles.file = opened()
        return handles.file.read_row_group(group, columns=[name], use_threads=False).column(name)

    return Columns(path, sizes, names, load)


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
            file = pyarrow.ipc.open_stream(mapped)
            batches = list(file)
        names = file.schema.names
    except Exception as error:
        raise BadData(path, f"it is no whole Arrow file ({first_line(error)})") from None
    sizes = [batch.num_rows for batch in batches]
    return Columns(path, sizes, names, lambda group, name: batches[group].column(name))


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
