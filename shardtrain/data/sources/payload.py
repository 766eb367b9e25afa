"""What is in a record of ArrayRecord and TFRecord: JSON, a `tf.train.Example`, or text.

The wire format is read here: no library that has the message is small.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardtrain.data.sources.format import BadData, Record, iterate_rows
from shardtrain.system.plain_text import MARK, decode_text
from shardtrain.system.untrusted_data import parse_record

Kind = Literal["json", "example", "text"]
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def kind_of(record: bytes) -> Kind:
    r"""Recognise what a record is; the first one decides for its file.

    >>> kind_of(b'{"text": "a"}'), kind_of(b"\n\r\n\x0b\n\x01a\x12\x06\n\x04\n\x02hi"), kind_of(b"plain")
    ('json', 'example', 'text')
    """
    if record.removeprefix(MARK.encode()).lstrip()[:1] == b"{":
        try:
            return "json" if isinstance(parse_record(record), dict) else "text"
        except ValueError:
            return "text"
    try:
        return "example" if parse_example(record) else "text"
    except (ValueError, IndexError, struct.error):
        return "text"


def parse_payload(record: bytes, kind: Kind, path: Path, row: int) -> Record:
    """Return the fields of a record; a text has the field text.

    Raises:
      BadData: it is not what the first record of the file is.
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
    except (ValueError, IndexError, struct.error) as error:
        raise BadData(path, f"the record is no {kind} as the first one ({error})", row) from None


class PayloadRows(ABC):
    """The rows of a file of records, of which the first one says what all are.

    Attributes:
      path: the file.
    """

    path: Path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def payload(self, row: int) -> bytes:
        """Return a record as it is stored.

        Raises:
          BadData: it cannot be read.
        """

    def read(self, row: int) -> Record:
        return parse_payload(self.payload(row), self._kind, self.path, row)

    def iterate(self, start: int, stop: int | None) -> Iterator[tuple[int, Record | BadData]]:
        return iterate_rows(self, start, stop)

    @cached_property
    def _kind(self) -> Kind:
        return kind_of(self.payload(0))


def parse_example(message: bytes) -> dict[str, Any]:
    r"""Parse a `tf.train.Example`.

    Returns:
      name -> bytes, or a list of bytes if there are several; float32 (n,); or int64 (n,).

    Raises:
      ValueError, IndexError, struct.error: it is none.

    References:
      https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
      https://protobuf.dev/programming-guides/encoding/

    >>> parse_example(b"\n\r\n\x0b\n\x01a\x12\x06\n\x04\n\x02hi")
    {'a': b'hi'}
    """
    found: dict[str, Any] = {}
    for number, features in _fields(message):
        _expect(number == 1)
        for number, entry in _fields(_message(features)):
            _expect(number == 1)
            pair = dict(_fields(_message(entry)))
            found[_message(pair.get(1, b"")).decode()] = _values(_message(pair.get(2, b"")))
    return found


def _values(feature: bytes) -> Any:
    for number, listed in _fields(feature):
        items = list(_fields(_message(listed)))
        _expect(number in (1, 2, 3) and all(field == 1 for field, _ in items))
        values = [value for _, value in items]
        if number == 1:
            texts = [_message(value) for value in values]
            return texts[0] if len(texts) == 1 else texts
        if number == 2:
            # packed, or one field for each
            packed = b"".join(_message(value) for value in values)
            return np.frombuffer(packed, "<f4").copy()
        numbers: list[int] = []
        for value in values:
            numbers += [value] if isinstance(value, int) else _varints(value)
        return np.array(numbers, np.uint64).astype(np.int64)
    return []


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message: a number for varints, else the bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire = tag & 7
        if wire == VARINT:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        if wire == BYTES:
            size, position = _varint(message, position)
        else:
            _expect(wire in (FIXED64, FIXED32))
            size = 8 if wire == FIXED64 else 4
        _expect(position + size <= len(message))
        yield tag >> 3, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), position
        shift += 7
        _expect(shift < 64)


def _varints(packed: bytes) -> list[int]:
    found, position = [], 0
    while position < len(packed):
        value, position = _varint(packed, position)
        found.append(value)
    return found


def _message(value: int | bytes) -> bytes:
    _expect(isinstance(value, bytes))
    return value  # type: ignore[return-value]


def _expect(condition: bool) -> None:
    if not condition:
        raise ValueError("it is no tf.train.Example")
