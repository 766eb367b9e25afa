"""Read Parquet and Arrow files, such as those of a Hugging Face `datasets` folder, by pyarrow.

A column is read one row group, or record batch, at a time; each thread keeps the last one that it read.
"""

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardtrain.data.sources.decoded_size import (
    LEAST_BYTES,
    SHARING,
    SIZE,
    TooLarge,
    arrow_blocks,
    check_column,
    check_decoded,
    limit_decoded,
    measure_decoded_message,
    measure_rows,
)
from shardtrain.data.sources.format import BadData, Format, Record, Rows
from shardtrain.data.sources.parquet_columns import CheckedColumns
from shardtrain.system.untrusted_files import open_regular

EXTRA = ("pyarrow", "arrow")
FOOTER_END = 10
"""Bytes after an Arrow footer: its size, and the magic bytes of the format."""

LEAST_ROWS, ROWS_OF_A_BYTE = 1 << 20, 1 << 10
"""Limit of the rows of a file: a constant, and a number for each byte, as equal values take little space."""


class Columns(Rows):
    """The rows of a file of columns, in groups; a column of a group is read when one of its values is needed.

    Args:
      path: the file.
      sizes: number of rows of each group.
      names: names of the columns.
      load: (number of a group, name of a column) -> a pyarrow array, which is validated, as a value outside
        of its buffers would end the process.

    Raises:
      BadData: the file declares more rows than it can have.
    """

    def __init__(
        self, path: Path, sizes: list[int], names: list[str], load: Callable[[int, str], Any]
    ) -> None:
        most = LEAST_ROWS + ROWS_OF_A_BYTE * path.stat().st_size
        if not all(0 <= size <= most for size in sizes) or sum(sizes) > most:
            raise BadData(path, f"it declares {sum(sizes):,} rows; a file of its size has {most:,} at most")
        self.path, self.names, self._load = path, dict.fromkeys(names), load
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._last = threading.local()
        self._errors: dict[tuple[int, str], Exception] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, row: int) -> Record:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return _Row(self, row)

    def value(self, row: int, name: str) -> Any:
        """Return a field of a row.

        Raises:
          BadData: the value cannot be read.
        """
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        start, stop = map(int, self._starts[group : group + 2])
        column = self._column(group, name)
        if isinstance(column, Exception):
            why = f"row group {group} (rows {start:,} to {stop - 1:,}) cannot be read ({first_line(column)})"
            raise BadData(self.path, why, row)
        try:
            if self._last.__dict__[name][2]:
                check_decoded(measure_rows(column.slice(row - start, 1)), LEAST_BYTES, "the row")
            return column[row - start].as_py()
        except UnicodeDecodeError as error:
            raise BadData(self.path, f"a text is not UTF-8 at its byte {error.start:,}", row) from None
        except Exception as error:
            raise BadData(self.path, f"field {name} cannot be read ({first_line(error)})", row) from None

    def _column(self, group: int, name: str) -> Any:
        """Return a column of a group, or its error.

        Each thread keeps the last column of each name, and whether its rows may be too large.
        """
        if (group, name) in self._errors:
            return self._errors[group, name]
        kept = self._last.__dict__
        if name not in kept or kept[name][0] != group:
            try:
                column = check_column(self._load(group, name))
                is_large = SHARING.search(str(column.type)) and measure_rows(column) > LEAST_BYTES
                kept[name] = group, column, is_large
            except Exception as error:
                if isinstance(error, FileNotFoundError):
                    raise
                # without its frames, which refer to arrays
                self._errors[group, name] = error.with_traceback(None)
                return error
        return kept[name][1]


class _Row(Mapping[str, Any]):
    """The fields of a row, each read when it is needed."""

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
    most = limit_decoded(path.stat().st_size)

    def opened(texts: list[str] | None = None) -> tuple[CheckedColumns, Any]:
        # not mapped into memory: a mapped file that is truncated ends the process
        source = CheckedColumns(open_regular(path), most, kept_once=texts is not None)
        return source, parquet.ParquetFile(source, read_dictionary=texts)

    try:
        source, file = opened()
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        names = file.schema_arrow.names
        leaves = [file.schema.column(i) for i in range(file.metadata.num_columns)]
        source.close()
    except FileNotFoundError:
        raise
    except Exception as error:
        raise BadData(path, f"it is no whole Parquet file ({first_line(error)})") from None
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    handles = threading.local()

    def load(group: int, name: str) -> Any:
        own = [leaf for leaf in leaves if f"{leaf.path}.".startswith(f"{name}.")]
        value_bytes = max((leaf.length or 0 for leaf in own), default=0)

        def read(kind: str, shared: list[str] | None) -> Any:
            if not hasattr(handles, kind):
                setattr(handles, kind, opened(shared))
            source, file = getattr(handles, kind)
            source.begin(value_bytes)
            return file.read_row_group(group, columns=[name], use_threads=False).column(name)

        try:
            return read("plain", None)
        except TooLarge:
            return read("sharing", texts)

    return Columns(path, sizes, names, load)


def open_arrow(path: Path, folder: Path | None = None) -> Columns:
    """Open an Arrow file, or an Arrow stream as `datasets` writes it."""
    pyarrow = import_module("pyarrow")
    num_bytes = path.stat().st_size
    try:
        mapped = pyarrow.memory_map(str(path))
        if mapped.read(6) == b"ARROW1":
            _check_messages(_file_messages(mapped), num_bytes, together=False)
            file = pyarrow.ipc.open_file(mapped)
            # decoded anew for each column: all batches of a compressed file would fill the memory
            get_batch, num_batches = file.get_batch, file.num_record_batches
        else:
            mapped.seek(0)
            _check_messages(pyarrow.ipc.MessageReader.open_stream(mapped), num_bytes, together=True)
            mapped.seek(0)
            file = pyarrow.ipc.open_stream(mapped)
            batches = list(file)
            get_batch, num_batches = batches.__getitem__, len(batches)
        names, sizes = file.schema.names, [get_batch(i).num_rows for i in range(num_batches)]
    except Exception as error:
        raise BadData(path, f"it is no whole Arrow file ({first_line(error)})") from None

    lock = threading.Lock()

    def load(group: int, name: str) -> Any:
        # beyond the end of a mapped file a signal would end the process
        if path.stat().st_size < num_bytes:
            raise ValueError("the file was cut off since it was opened")
        with lock:
            column = get_batch(group).column(name)
        column.validate()
        # before every byte of shared texts is checked
        if "_view" in str(column.type):
            check_decoded(measure_rows(column), limit_decoded(num_bytes), name)
        column = check_column(column)
        # two arrays are copied into one, which does not change with the file
        return pyarrow.concat_arrays([column, column[:0]])

    return Columns(path, sizes, names, load)


def _file_messages(mapped: Any) -> Iterator[Any]:
    """Yield the messages of an Arrow file that its footer names."""
    end = mapped.size() - FOOTER_END
    size = int.from_bytes(mapped.read_at(4, max(end, 0)), "little")
    for place in arrow_blocks(memoryview(mapped.read_at(size, end - size))):
        mapped.seek(place)
        yield import_module("pyarrow").ipc.read_message(mapped)


def _check_messages(messages: Iterable[Any], num_bytes: int, *, together: bool) -> None:
    """Check the decoded size of each batch, or of all `together`; dictionaries are always kept.

    Raises:
      ValueError: the size is above the limit for a file of `num_bytes`.
    """
    most, kept = limit_decoded(num_bytes), 0
    for message in messages:
        decoded, num_values = measure_decoded_message(
            memoryview(message.metadata), memoryview(message.body or b"")
        )
        check_decoded(kept + max(decoded, num_values * SIZE), most, "its batches" if together else "a batch")
        kept += decoded if together or message.type == "dictionary" else 0


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
