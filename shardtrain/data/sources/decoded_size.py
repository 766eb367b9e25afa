"""Limit the memory of decoded columns, as a few bytes of a file can represent any number of values.

For Arrow files the size is measured here, before pyarrow allocates it, from the sizes that precede compressed
buffers; for Parquet files in `parquet_columns.py`. Next: `columns.py`.
"""

import re
import struct
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

LEAST_BYTES, BYTES_OF_A_BYTE = 1 << 29, 1 << 4
"""Limit of the decoded bytes of a column of a row group: a constant, and a number for each byte of the
file."""

SIZE = 12
"""Bytes of a value and its levels, without the content of a text."""

SHARING = re.compile(r"<.*(dictionary<|_view\b|run_end_encoded<|union<)|^\w*list_view<|^\w*union<")
"""Types of which a few bytes can represent any number of values in one row."""

VIEW_BYTES = 16
"""Bytes of an entry of an Arrow view; the length of the text comes first."""

RECORD_BATCH, DICTIONARY_BATCH = 3, 2
LEGACY_COMPRESSION = b"ARROW:experimental_compression"

HOW = "write smaller row groups or shorter rows, of texts without DELTA_BYTE_ARRAY"


def limit_decoded(num_bytes: int) -> int:
    """Return the largest decoded size of a column, for a file of `num_bytes`."""
    return LEAST_BYTES + BYTES_OF_A_BYTE * num_bytes


class TooLarge(ValueError):
    """Data would take more memory than the limit."""


def check_decoded(num_bytes: int, most: int, what: str) -> None:
    """Check a size before memory is allocated.

    Raises:
      TooLarge: it is above `most`.
    """
    if num_bytes > most:
        raise TooLarge(f"{what} would take {num_bytes:,} bytes; at most {most:,} are read; {HOW}")


def check_column(column: Any) -> Any:
    """Check that all values of a column are inside its buffers; texts that are no UTF-8 pass.

    Raises:
      ValueError: a value is outside.
    """
    for chunk in getattr(column, "chunks", [column]):
        chunk.validate()
        try:
            chunk.validate(full=True)
        except ValueError:
            chunk.view(_find_stored_type(chunk.type)).validate(full=True)
    return column


def _find_stored_type(kind: Any) -> Any:
    """Return the type with the same buffers in which any text and date is valid."""
    pyarrow = import_module("pyarrow")
    types = pyarrow.types

    def field(each: Any) -> Any:
        return each.with_type(_find_stored_type(each.type))

    if types.is_struct(kind):
        return pyarrow.struct([field(kind.field(i)) for i in range(kind.num_fields)])
    if types.is_map(kind):
        return pyarrow.map_(field(kind.key_field), field(kind.item_field))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(field(kind.value_field), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return (pyarrow.list_ if types.is_list(kind) else pyarrow.large_list)(field(kind.value_field))
    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, _find_stored_type(kind.value_type))
    plain = {
        "string": pyarrow.binary(),
        "large_string": pyarrow.large_binary(),
        "date64[ms]": pyarrow.int64(),
    }
    return plain.get(str(kind), kind)


def measure_rows(array: Any) -> int:
    """Return the memory of values in Python if they share nothing.

    Raises:
      ValueError: lists of this type share their values.
    """
    pyarrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    types, kind = pyarrow.types, array.type
    if isinstance(array, pyarrow.ChunkedArray):
        return sum(map(measure_rows, array.chunks))
    if types.is_map(kind):
        array = array.view(pyarrow.list_(pyarrow.struct([kind.key_field, kind.item_field])))
        kind = array.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return SIZE * len(array) + measure_rows(array.flatten())
    if types.is_struct(kind):
        return sum(map(measure_rows, array.flatten()))
    if types.is_dictionary(kind) and not types.is_nested(kind.value_type):
        texts = compute.binary_length(array.dictionary.cast(pyarrow.binary()))
        return compute.sum(texts.take(array.indices)).as_py() or 0
    if types.is_string_view(kind) or types.is_binary_view(kind):
        sizes = np.frombuffer(array.buffers()[1], "<i4")[:: VIEW_BYTES // 4]
        return int(sizes[array.offset : array.offset + len(array)].sum(dtype=np.int64))
    if SHARING.search(str(kind)) or types.is_dictionary(kind):
        raise ValueError(f"type {kind} is not read in a row; write plain lists")
    return array.nbytes + SIZE * len(array)


def measure_decoded_message(metadata: memoryview, body: memoryview) -> tuple[int, int]:
    """Return (decompressed bytes of the buffers of an Arrow message, largest number of values of an array).

    Args:
      metadata: metadata of the message, which pyarrow has verified.
      body: its buffers; a compressed buffer begins with its size.

    Raises:
      ValueError: the message is damaged.
    """
    try:
        message = _reference(metadata, 0)
        kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
        if not kind or not header or metadata[kind] not in (RECORD_BATCH, DICTIONARY_BATCH):
            return 0, 0
        batch = _reference(metadata, header)
        if metadata[kind] == DICTIONARY_BATCH:
            batch = _reference(metadata, _field(metadata, batch, 1))
        is_compressed = _field(metadata, batch, 3) or LEGACY_COMPRESSION in bytes(metadata)
        num_values = max((count for count, _ in _pairs(metadata, _field(metadata, batch, 1))), default=0)
        num_bytes = 0
        for offset, size in _pairs(metadata, _field(metadata, batch, 2)):
            (declared,) = struct.unpack_from("<q", body, offset) if is_compressed and size else (-1,)
            num_bytes += size if declared == -1 else declared
            if size < 0 or offset < 0 or declared < -1:
                raise ValueError("a buffer has a negative size")
    except (IndexError, struct.error):
        raise ValueError("the header of a batch is damaged") from None
    return num_bytes, num_values


def arrow_blocks(footer: memoryview) -> list[int]:
    """Return the offsets of the messages of an Arrow file, from its footer.

    Raises:
      ValueError: the footer is damaged.
    """
    try:
        root = _reference(footer, 0)
        return [
            struct.unpack_from("<q", footer, place)[0]
            for number in (2, 3)
            for place in _items(footer, _field(footer, root, number), 24)
        ]
    except (IndexError, struct.error):
        raise ValueError("the footer is damaged") from None


def _reference(data: memoryview, place: int) -> int:
    """Follow an offset of a FlatBuffer."""
    return place + struct.unpack_from("<I", data, place)[0]


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the offset of a field of a table; 0 if there is none."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _items(data: memoryview, place: int, num_bytes: int) -> range:
    """Return the offsets of the items of a vector; none if there is no vector."""
    if not place:
        return range(0)
    vector = _reference(data, place)
    count = struct.unpack_from("<I", data, vector)[0]
    return range(vector + 4, vector + 4 + count * num_bytes, num_bytes)


def _pairs(data: memoryview, place: int) -> Iterator[tuple[int, int]]:
    return (struct.unpack_from("<qq", data, item) for item in _items(data, place, 16))
