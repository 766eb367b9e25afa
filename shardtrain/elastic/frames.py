"""What members send each other: a JSON header and the bytes of arrays, checked on arrival. No sockets.

Nothing is unpickled, and no size that a peer declares allocates memory: the receiver names the arrays that it
expects. Next: `sockets.py`.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import parse_json

MOST_HEADER_BYTES = 1 << 20
CHUNK_BYTES = 1 << 19
"""Largest number of bytes of an array in one message. Longer ones are slower to encrypt, in new memory."""


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
    """

    peer: str
    reason: str
    closed: bool = False


def encode_header(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Encode a header with the dtypes and shapes of the arrays that follow it.

    Raises:
      ValueError: it is no JSON, or too long.

    >>> encode_header({"step": 3}, [np.zeros((2, 3), np.float32)])
    b'[{"step": 3}, [["float32", [2, 3]]]]'
    """
    content = json.dumps([header, [describe(array) for array in arrays]], allow_nan=False).encode()
    if len(content) > MOST_HEADER_BYTES:
        raise ValueError(
            f"the header {short(header)} takes {len(content):,} bytes; at most {MOST_HEADER_BYTES:,} are"
            " sent. Send its long values as an array"
        )
    return content


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
    [524288, 1]
    """
    view = _view_bytes(array)
    return [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]


def parse_header(content: bytes) -> tuple[dict[str, Any], list[Any]]:
    """Parse what `encode_header` wrote.

    Raises:
      UnexpectedFrame: it is something else.
    """
    if len(content) > MOST_HEADER_BYTES:
        raise UnexpectedFrame(f"a header of {len(content):,} bytes; at most {MOST_HEADER_BYTES:,} are read")
    try:
        found = parse_json(content.decode())
    except ValueError as error:
        raise UnexpectedFrame(f"a header that is no JSON: {short(content)}: {error}") from None
    if not (isinstance(found, list) and [type(each) for each in found] == [dict, list]):
        raise UnexpectedFrame(f"the header {short(found)}; it is an object and a list of arrays")
    return found[0], found[1]


class IncomingMessage:
    """A message whose chunks arrive one by one.

    Args:
      peer: the sender.
      header: of the message.
      declared: dtypes and shapes as the sender declares them.
      arrays: what is expected, which is filled.

    Raises:
      UnexpectedFrame: the sender declares other arrays.
    """

    def __init__(
        self, peer: str, header: dict[str, Any], declared: list[Any], arrays: Sequence[np.ndarray]
    ) -> None:
        expected = [describe(array) for array in arrays]
        if declared != expected:
            raise UnexpectedFrame(
                f"arrays of {short(declared)} for {short(header)}; expected {short(expected)}"
            )
        assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)
        self.received = Received(peer, header, arrays)
        views = map(_view_bytes, arrays)
        self._empty = deque(view for view in views if len(view))

    @property
    def is_whole(self) -> bool:
        return not self._empty

    def add(self, chunk: memoryview) -> None:
        """Copy the next chunk into the array that it belongs to.

        Raises:
          UnexpectedFrame: it is empty, or longer than what is missing of that array.
        """
        left = self._empty[0]
        if not 0 < len(chunk) <= len(left):
            raise UnexpectedFrame(f"{len(chunk):,} bytes of an array of which {len(left):,} are missing")
        # numpy releases the lock of the interpreter, a slice of a memoryview does not
        np.copyto(np.frombuffer(left[: len(chunk)], np.uint8), np.frombuffer(chunk, np.uint8))
        if len(chunk) == len(left):
            self._empty.popleft()
        else:
            self._empty[0] = left[len(chunk) :]


def _view_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
