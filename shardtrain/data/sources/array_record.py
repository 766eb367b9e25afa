"""Read ArrayRecord files; only this module imports array_record."""

import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from shardtrain.data.sources.format import BadData, Format
from shardtrain.data.sources.payload import PayloadRows


class ArrayRecords(PayloadRows):
    """The records of a file, located by its own index; each thread has a reader."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self._readers = threading.local()
        path.stat()
        try:
            self._num_rows = self._reader().num_records()
        except Exception as error:
            raise BadData(path, f"it is no whole ArrayRecord file ({error})") from None
        if not self._reader().ok():
            raise BadData(path, "it is no whole ArrayRecord file: its index is missing at the end")

    def __len__(self) -> int:
        return self._num_rows

    def payload(self, row: int) -> bytes:
        if not 0 <= row < self._num_rows:
            raise IndexError(row)
        try:
            return self._reader().read([row])[0]
        except Exception as error:
            raise BadData(self.path, f"the record cannot be read ({error})", row) from None

    def _reader(self) -> Any:
        if not hasattr(self._readers, "reader"):
            module = import_module("array_record.python.array_record_module")
            # for random access: nothing is read ahead
            options = "readahead_buffer_size:0,max_parallelism:0"
            self._readers.reader = module.ArrayRecordReader(str(self.path), options)
        return self._readers.reader


FORMAT = Format(
    summary="ArrayRecord",
    suffixes=(".array_record", ".arrayrecord"),
    rows=ArrayRecords,
    needs=("array_record", "array-record"),
)
