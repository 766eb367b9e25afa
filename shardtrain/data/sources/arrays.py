"""Checks of pyarrow's arrays: values outside of their buffers, and what a row takes in Python.

Next: `columns.py`, which reads them.
"""

import re
from importlib import import_module
from typing import Any

import numpy as np

from shardtrain.data.sources.decoded_size import SIZE

SHARING = re.compile(r"<.*(dictionary<|_view\b|run_end_encoded<|union<)|^\w*list_view<|^\w*union<")
"""Types of which a few bytes can stand for any number of values in one row."""

VIEW_BYTES = 16
"""Of a text in an Arrow view; its length comes first."""


def checked(column: Any) -> Any:
    """Check that all values of a column are inside its buffers; its rows report texts that are no UTF-8.

    Raises:
      ValueError: they are not.
    """
    for chunk in getattr(column, "chunks", [column]):
        chunk.validate()
        try:
            chunk.validate(full=True)
        except ValueError:
            chunk.view(_stored(chunk.type)).validate(full=True)
    return column


def _stored(kind: Any) -> Any:
    """Return the type of the same buffers in which any text and date is valid."""
    pyarrow = import_module("pyarrow")
    types = pyarrow.types

    def field(each: Any) -> Any:
        return each.with_type(_stored(each.type))

    if types.is_struct(kind):
        return pyarrow.struct([field(kind.field(i)) for i in range(kind.num_fields)])
    if types.is_map(kind):
        return pyarrow.map_(field(kind.key_field), field(kind.item_field))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(field(kind.value_field), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return (pyarrow.list_ if types.is_list(kind) else pyarrow.large_list)(field(kind.value_field))
    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, _stored(kind.value_type))
    plain = {
        "string": pyarrow.binary(),
        "large_string": pyarrow.large_binary(),
        "date64[ms]": pyarrow.int64(),
    }
    return plain.get(str(kind), kind)


def row_bytes(array: Any) -> int:
    """Return what values take in Python if they share nothing.

    Raises:
      ValueError: they are of a type in which lists share their values.
    """
    pyarrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    types, kind = pyarrow.types, array.type
    if isinstance(array, pyarrow.ChunkedArray):
        return sum(map(row_bytes, array.chunks))
    if types.is_map(kind):
        array = array.view(pyarrow.list_(pyarrow.struct([kind.key_field, kind.item_field])))
        kind = array.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return SIZE * len(array) + row_bytes(array.flatten())
    if types.is_struct(kind):
        return sum(map(row_bytes, array.flatten()))
    if types.is_dictionary(kind) and not types.is_nested(kind.value_type):
        texts = compute.binary_length(array.dictionary.cast(pyarrow.binary()))
        return compute.sum(texts.take(array.indices)).as_py() or 0
    if types.is_string_view(kind) or types.is_binary_view(kind):
        sizes = np.frombuffer(array.buffers()[1], "<i4")[:: VIEW_BYTES // 4]
        return int(sizes[array.offset : array.offset + len(array)].sum(dtype=np.int64))
    if SHARING.search(str(kind)) or types.is_dictionary(kind):
        raise ValueError(f"type {kind} is not read in a row; write plain lists")
    return array.nbytes + SIZE * len(array)
