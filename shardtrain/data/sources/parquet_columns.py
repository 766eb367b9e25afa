"""Measure the decoded size of a column of a Parquet file, from the headers of its pages."""

import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from shardtrain.data.sources.decoded_size import SIZE, check_decoded

MOST_PAGES, PADDING = 1 << 17, 100
INT32, STRUCT, MOST_DEPTH = 5, 12, 64
DICTIONARY, DELTA_BYTE_ARRAY = (2, 8), 7
"""Numbers of Parquet's encodings in which a text may take less space than itself."""

DICTIONARY_PAGE = -1
PAGE_TYPE, UNCOMPRESSED, COMPRESSED = 1, 2, 3
DATA_PAGES = {0: (5, 2), 3: (8, 4)}
"""Type of a page -> the fields of its header, and of the encoding in it; field 1 there counts values."""


class CheckedColumns:
    """A Parquet file for pyarrow, which checks the decoded size of columns before they are decoded.

    Sizes in the footer are not used: they may be wrong, and some errors in a footer end the process.

    Args:
      file: the file.
      most: the largest decoded size of a column.
      kept_once: whether each text of a dictionary is in memory only once.
    """

    def __init__(self, file: BinaryIO, most: int, *, kept_once: bool) -> None:
        self._file, self._most, self._kept_once, self._at = file, most, kept_once, 0
        self._value_bytes: int | None = None
        self.close = file.close

    def __del__(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        # a position of its own: processes that are forked share the file's
        start = (0, self._at, os.fstat(self._file.fileno()).st_size)[whence]
        self._at = start + offset
        return self._at

    def begin(self, value_bytes: int) -> None:
        """Check columns from now on; `value_bytes` is the length of a value, 0 for texts."""
        self._value_bytes, self._total = value_bytes, 0

    def read(self, num_bytes: int) -> bytes:
        content = b""
        while len(content) < num_bytes and (read := self._read(num_bytes - len(content))):
            content += read
        if self._value_bytes is not None:
            self._total += measure_decoded_column(content, self._value_bytes)[0 if self._kept_once else 1]
            check_decoded(self._total, self._most, "the column")
        return content

    def _read(self, num_bytes: int) -> bytes:
        read = os.pread(self._file.fileno(), num_bytes, self._at)
        self._at += len(read)
        return read


def measure_decoded_column(content: bytes, value_bytes: int) -> tuple[int, int]:
    """Return the decoded size of a column of a row group, from the headers of its pages.

    Args:
      content: the column in the file.
      value_bytes: length of a value; 0 for texts.

    Returns:
      The bytes if each text of a dictionary is kept once, and if every value is as long as the dictionary.

    Raises:
      ValueError: a header is damaged.
    """
    once, repeated, dictionary_bytes = 0, 0, 0
    for num_bytes, num_values, encoding in _read_pages(content):
        # a text may share its beginning with the text before it
        copies = num_values if encoding == DELTA_BYTE_ARRAY else 1
        once += copies * num_bytes + num_values * (SIZE + value_bytes)
        if encoding == DICTIONARY_PAGE:
            dictionary_bytes = max(dictionary_bytes, num_bytes)
        elif encoding in DICTIONARY and not value_bytes:
            repeated += num_values * dictionary_bytes
    return once, once + repeated


def _read_pages(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (decompressed bytes, number of values, encoding) of the pages of a column."""
    file = io.BytesIO(content)
    for _ in range(MOST_PAGES):
        start = file.tell()
        if start >= len(content):
            return
        try:
            page = _read_struct(file)
        except ValueError:
            # pyarrow reads this many more bytes of a column from an old writer
            if len(content) - start <= PADDING:
                return
            raise
        sizes: tuple[Any, ...] = page.get(UNCOMPRESSED), page.get(COMPRESSED)
        if number := DATA_PAGES.get(page.get(PAGE_TYPE, -1)):
            header = page.get(number[0])
            sizes += (header.get(1), header.get(number[1])) if isinstance(header, dict) else (None, None)
        else:
            sizes += 0, DICTIONARY_PAGE
        if not all(isinstance(size, int) and size >= 0 for size in sizes[:3]):
            raise ValueError("a header of a page is damaged")
        num_bytes, compressed_bytes, num_values, encoding = sizes
        yield num_bytes, num_values, encoding
        file.seek(compressed_bytes, 1)
    raise ValueError(f"a column of a row group has more than {MOST_PAGES:,} pages")


def _read_struct(file: io.BytesIO, depth: int = 0) -> dict[int, Any]:
    """Read the 32-bit integers and structs in a struct of Thrift's compact protocol, as pyarrow does."""
    found: dict[int, Any] = {}
    number = 0
    while (head := _read_byte(file)) != 0:
        number = number + (head >> 4) if head >> 4 else _read_integer(file)
        kind = head & 15
        value = _read_value(file, kind, depth) if kind not in (1, 2) else None
        if kind in (INT32, STRUCT):
            found[number] = value
    return found


def _read_value(file: io.BytesIO, kind: int, depth: int) -> Any:
    if kind in (1, 2, 3):
        return _read_byte(file)
    if kind in (4, INT32, 6):
        return _read_integer(file)
    if kind in (7, 8):
        num_bytes = 8 if kind == 7 else _read_varint(file)
        # a list may claim any number of values, but none is after the end
        if num_bytes > len(file.getbuffer()) - file.tell():
            raise ValueError("the file ends in a header of a page")
        file.seek(num_bytes, 1)
        return None
    if depth >= MOST_DEPTH or kind not in (9, 10, 11, STRUCT):
        raise ValueError("a header of a page is damaged")
    if kind == STRUCT:
        return _read_struct(file, depth + 1)
    # lists, sets and maps
    if kind == 11:
        count = _read_varint(file)
        kinds = divmod(_read_byte(file), 16) if count else ()
    else:
        count, each = divmod(_read_byte(file), 16)
        count, kinds = _read_varint(file) if count == 15 else count, (each,)
    for _ in range(count):
        for each in kinds:
            _read_value(file, each, depth + 1)
    return None


def _read_byte(file: BinaryIO) -> int:
    read = file.read(1)
    if not read:
        raise ValueError("the file ends in a header of a page")
    return read[0]


def _read_varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _read_byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a header of a page is damaged")


def _read_integer(file: BinaryIO) -> int:
    value = _read_varint(file)
    return value >> 1 ^ -(value & 1)
