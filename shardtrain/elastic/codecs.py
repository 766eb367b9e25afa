"""Codecs of the sums that islands send each other. Next: `flat_sum.py`.

They have no residual (combine/codec.py), which would be lost with its island. What was decoded is encoded
without an error, so all members hold the same numbers, however often they are passed on.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import ml_dtypes
import numpy as np

Arrays = list[np.ndarray]

BLOCK = 64
"""Elements with one scale."""

SLAB = 1024 * BLOCK
"""Elements that are encoded at a time, which stay in a cache."""

LEVELS = 127
"""Absolute value of the largest encoded element of a block."""

LEAST_SCALE = np.float32(2.0**-126)
"""A block with a smaller one is sent as 0, as float32 has fewer bits for it."""


class Codec(Protocol):
    """Encodes a flat float32 array as one or more arrays.

    Attributes:
      num_arrays: their number.
      block: elements that are encoded together; arrays and chunks begin at a multiple of it.
    """

    num_arrays: int
    block: int

    def list_arrays(self, size: int) -> Arrays:
        """Return arrays like the encoded ones of so many elements, without values."""
        ...

    def encode(self, x: np.ndarray) -> Arrays:
        """Return the encoded arrays; an array that is not encoded is `x` itself."""
        ...

    def decode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the float32 array."""
        ...


class Plain:
    """Sends arrays of any dtype as they are."""

    num_arrays, block = 1, 1

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype

    def list_arrays(self, size: int) -> Arrays:
        return [np.empty(size, self._dtype)]

    def encode(self, x: np.ndarray) -> Arrays:
        return [x]

    def decode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0]


class BFloat16:
    """Sends 16 bits an element: 8 bits of precision."""

    num_arrays, block = 1, 1

    def list_arrays(self, size: int) -> Arrays:
        return [np.empty(size, np.uint16)]

    def encode(self, x: np.ndarray) -> Arrays:
        return [x.astype(ml_dtypes.bfloat16).view(np.uint16)]

    def decode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].view(ml_dtypes.bfloat16).astype(np.float32)


class Int8:
    """Sends 8 bits an element, and for each block its largest one, divided by 127, in 16 bits.

    An element is off by at most 1/253 of the largest one of its block, each time that it is encoded. A block
    with an infinite element, or with one that is no number, becomes NaN; one whose elements are all below
    127 times `LEAST_SCALE` becomes 0.

    >>> codec = Int8()
    >>> codec.decode(codec.encode(np.float32([127, -26.4, 0])))
    array([127., -26.,   0.], dtype=float32)
    """

    num_arrays, block = 2, BLOCK

    def list_arrays(self, size: int) -> Arrays:
        return [np.empty(size, np.int8), np.empty(-(-size // BLOCK), np.uint16)]

    def encode(self, x: np.ndarray) -> Arrays:
        values, scales = self.list_arrays(x.size)
        for start in range(0, x.size, SLAB):
            part = slice(start, start + SLAB)
            values[part], scales[start // BLOCK : (start + SLAB) // BLOCK] = _encode_slab(x[part])
        return [values, scales]

    def decode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        values, scales = arrays
        found = values.astype(np.float32)
        with np.errstate(invalid="ignore"):  # 0 times infinity
            found *= np.repeat(scales.view(ml_dtypes.bfloat16).astype(np.float32), BLOCK)[: values.size]
        return found


def _encode_slab(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = np.zeros((-(-x.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: x.size] = x
    scales = (np.abs(blocks).max(1, initial=0) / LEVELS).astype(ml_dtypes.bfloat16)
    scales[scales < LEAST_SCALE] = 0
    divisors = scales.astype(np.float32)[:, None]
    # rounding the scale changes the largest element's 127 by a quarter at most
    is_scaled = np.isfinite(divisors) & (divisors > 0)
    values = np.rint(np.divide(blocks, divisors, where=is_scaled, out=np.zeros_like(blocks)))
    return values.astype(np.int8).reshape(-1)[: x.size], scales.view(np.uint16)


CODECS: Mapping[str, Codec] = {"bfloat16": BFloat16(), "int8": Int8()}
"""Name, as in `combine.CODECS` -> codec."""
