"""What members send each other: a JSON header and the bytes of arrays, checked on arrival. No sockets.

Nothing is unpickled, and no size that a peer declares allocates memory: the receiver names the arrays that it
expects. Next: `sockets.py`.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import parse_json

MOST_HEADER_BYTES = 1 << 20
LENGTH = struct.Struct("<I")
"""What comes before a header: its number of bytes."""

CHUNK_BYTES = 1 << 18
"""Largest number of bytes that are encrypted at once: others have their turn after it."""


class UnexpectedFrame(ValueError):
    """A peer sent something unexpected."""


@dataclass(frozen=True, eq=False)
class Received:
    """A whole message of a peer, which is named by its key.

    Attributes:
      peer: the name of the sender.
      header: what it sent as header.
      buffers: the arrays that `expect` named, filled.
    """

    peer: str
    header: dict[str, Any]
    buffers: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Lost:
    """A peer that is gone, was silent for longer than the patience, or sent something unexpected.

    Attributes:
      peer: its name.
      reason: what happened, for the user.
      closed: whether its process has ended, for sure.
      misfits: whether it sent something unexpected.
    """

    peer: str
    reason: str
    closed: bool = False
    misfits: bool = False


def encode_header(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Encode a header, its length first, with the dtypes and shapes of the arrays that follow it.

    Raises:
      ValueError: it is no JSON, or too long.

    >>> encode_header({"step": 3}, [np.zeros((2, 3), np.float32)])
    b'$\\x00\\x00\\x00[{"step": 3}, [["float32", [2, 3]]]]'
    """
    content = json.dumps([header, [describe(array) for array in arrays]], allow_nan=False).encode()
    if len(content) > MOST_HEADER_BYTES:
        raise ValueError(
            f"the header {short(header)} takes {len(content):,} bytes; at most {MOST_HEADER_BYTES:,} are"
            " sent. Send its long values as an array"
        )
    return LENGTH.pack(len(content)) + content


def describe(array: np.ndarray) -> list[Any]:
    return [array.dtype.name, list(array.shape)]


def check_array(array: np.ndarray) -> None:
    """Check that an array can be sent as it is in memory.

    Raises:
      ValueError: it is not contiguous, holds Python objects, or has the other byte order.
    """
    if array.dtype.hasobject or not array.dtype.isnative or not array.flags.c_contiguous:
        raise ValueError(
            f"an array of {array.dtype.str} with shape {array.shape} and strides {array.strides} cannot be"
            " sent; numbers in native byte order can, in an array that np.ascontiguousarray returns"
        )


def cut_into_chunks(array: np.ndarray) -> list[memoryview]:
    """Return views of an array's bytes, each of at most `CHUNK_BYTES`.

    >>> [len(chunk) for chunk in cut_into_chunks(np.zeros(CHUNK_BYTES + 1, np.int8))]
    [262144, 1]
    """
    view = _view_bytes(array)
    return [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]


def parse_header(content: bytes) -> tuple[dict[str, Any], list[Any]]:
    """Parse what `encode_header` wrote behind the length.

    Raises:
      UnexpectedFrame: it is something else.
    """
    try:
        found = parse_json(content.decode())
    except ValueError as error:
        raise UnexpectedFrame(f"a header that is no JSON: {short(content)}: {error}") from None
    if not (isinstance(found, list) and [type(each) for each in found] == [dict, list]):
        raise UnexpectedFrame(f"the header {short(found)}; it is an object and a list of arrays")
    return found[0], found[1]


def read_messages(
    peer: str, expect: Callable[[str, dict[str, Any]], Sequence[np.ndarray]]
) -> Iterator[memoryview | Received]:
    """Read a stream of messages.

    Args:
      peer: the sender.
      expect: returns the arrays to fill for a header, or raises ValueError.

    Yields:
      Memory to fill with the next bytes of the stream, and each message once it is whole.

    Raises:
      UnexpectedFrame: the sender sent something else.
    """
    while True:
        length = bytearray(LENGTH.size)
        yield memoryview(length)
        (num_bytes,) = LENGTH.unpack(length)
        if not 0 < num_bytes <= MOST_HEADER_BYTES:
            raise UnexpectedFrame(f"a header of {num_bytes:,} bytes; at most {MOST_HEADER_BYTES:,} are read")
        content = bytearray(num_bytes)
        yield memoryview(content)
        header, declared = parse_header(bytes(content))
        try:
            arrays = expect(peer, header)
        except ValueError as error:
            raise UnexpectedFrame(f"an unknown header: {error}") from None
        expected = [describe(array) for array in arrays]
        if declared != expected:
            raise UnexpectedFrame(
                f"arrays of {short(declared)} for {short(header)}; expected {short(expected)}"
            )
        for array in arrays:
            assert array.flags.c_contiguous
            yield _view_bytes(array)
        yield Received(peer, header, arrays)


def _view_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
