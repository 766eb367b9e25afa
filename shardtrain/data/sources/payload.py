"""Parse records of ArrayRecord and TFRecord files: JSON, a `tf.train.Example`, or text."""

from abc import abstractmethod
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardtrain.data.sources.format import BadData, Record, Rows
from shardtrain.system.plain_text import MARK, decode_text
from shardtrain.system.protobuf import parse_message
from shardtrain.system.untrusted_data import parse_record

Kind = Literal["json", "example", "text"]
DTYPES = {"float_list": np.float32, "int64_list": np.int64}

EXAMPLE = """
name: "example.proto" package: "shardtrain" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: "Int64List" oneof_index: 0 }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""
"""The message `tf.train.Example`, whose map is a list of entries on the wire.

References:
  https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
"""


def recognise_kind(record: bytes) -> Kind:
    r"""Recognise the kind of a record; the first record decides for its file.

    >>> [recognise_kind(x) for x in (b'{"text": "a"}', b"\n\r\n\x0b\n\x01a\x12\x06\n\x04\n\x02hi", b"plain")]
    ['json', 'example', 'text']
    """
    if record.removeprefix(MARK.encode()).lstrip()[:1] == b"{":
        try:
            return "json" if isinstance(parse_record(record), dict) else "text"
        except ValueError:
            return "text"
    try:
        return "example" if parse_example(record) else "text"
    except ValueError:
        return "text"


def parse_payload(record: bytes, kind: Kind, path: Path, row: int) -> Record:
    """Return the fields of a record; a text has the field text.

    Raises:
      BadData: the record is not of this kind.
    """
    try:
        if kind == "example":
            return parse_example(record)
        if kind == "text":
            return {"text": decode_text(record)}
        found = parse_record(record)
        if not isinstance(found, dict):
            raise ValueError(f"a JSON {type(found).__name__}, not an object")
        return found
    except ValueError as error:
        raise BadData(path, f"the record is no {kind} as the first one ({error})", row) from None


class PayloadRows(Rows):
    """The rows of a file of records, all of the kind of the first record.

    Attributes:
      path: the file.
    """

    path: Path

    @abstractmethod
    def payload(self, row: int) -> bytes:
        """Return the stored bytes of a record.

        Raises:
          BadData: the record cannot be read.
        """

    def read(self, row: int) -> Record:
        return parse_payload(self.payload(row), self._kind, self.path, row)

    @cached_property
    def _kind(self) -> Kind:
        return recognise_kind(self.payload(0))


def parse_example(message: bytes) -> dict[str, Any]:
    r"""Parse a `tf.train.Example`.

    Returns:
      name -> bytes, or a list of bytes if there are several; float32 (n,); or int64 (n,).

    Raises:
      ValueError: it is no `tf.train.Example`.

    >>> parse_example(b"\n\r\n\x0b\n\x01a\x12\x06\n\x04\n\x02hi")
    {'a': b'hi'}
    """
    unknown_fields = import_module("google.protobuf.unknown_fields")
    try:
        example = parse_message(EXAMPLE, "Example", message)
    except ValueError as error:
        raise ValueError(f"it is no tf.train.Example ({error})") from None
    if any(len(unknown_fields.UnknownFieldSet(each)) for each in (example, example.features)):
        raise ValueError("it is no tf.train.Example")
    found: dict[str, Any] = {}
    for entry in example.features.feature:
        kind = entry.value.WhichOneof("kind")
        values = getattr(entry.value, kind).value if kind else []
        if kind == "bytes_list":
            found[entry.key] = values[0] if len(values) == 1 else list(values)
        else:
            found[entry.key] = np.array(values, DTYPES[kind]) if kind else []
    return found
