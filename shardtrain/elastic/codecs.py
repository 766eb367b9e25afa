"""Codecs of the sums that islands send each other. Next: `flat_sum.py`.

They have no residual (combine/codec.py), which would be lost with its island. What was decoded is encoded
without an error, so all members hold the same numbers, however often they are passed on.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import ml_dtypes
import numpy as np

Arrays = list[np.ndarray]

BLOCK = 256
"""Elements with one exponent."""

SLAB = 256 * BLOCK
"""Elements that are encoded at a time, which stay in a cache."""

LEVELS = 127
"""Largest absolute value of an encoded element."""

NO_NUMBER = np.iinfo(np.int16).max
"""Exponent of a block that is not finite."""

LEAST_EXPONENT = -110
"""Blocks all below 2 to the power of this are sent as 0, as float32 has fewer bits for them."""


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
    """Sends 8 bits an element, and for each block 16 bits: the exponent of a power of two that scales it.

    An element is off by at most 1/64 of the largest one of its block, each time that it is encoded.

    >>> codec = Int8()
    >>> codec.decode(codec.encode(np.float32([1.5, -0.26, 0])))
    array([ 1.5     , -0.265625,  0.      ], dtype=float32)
    """

    num_arrays, block = 2, BLOCK

    def list_arrays(self, size: int) -> Arrays:
        return [np.empty(size, np.int8), np.empty(-(-size // BLOCK), np.int16)]

    def encode(self, x: np.ndarray) -> Arrays:
        values, exponents = self.list_arrays(x.size)
        for start in range(0, x.size, SLAB):
            part = slice(start, start + SLAB)
            values[part], exponents[start // BLOCK : (start + SLAB) // BLOCK] = _encode_slab(x[part])
        return [values, exponents]

    def decode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        values, exponents = arrays
        found = np.empty(values.size, np.float32)
        for start in range(0, values.size, SLAB):
            part = slice(start, start + SLAB)
            found[part] = _decode_slab(values[part], exponents[start // BLOCK : (start + SLAB) // BLOCK])
        return found


def _encode_slab(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = np.zeros((-(-x.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: x.size] = x
    most = np.abs(blocks).max(1, initial=0)
    is_finite = np.isfinite(most)
    blocks[~is_finite | (most < 2.0**LEAST_EXPONENT)] = 0
    exponents = np.frexp(np.where(is_finite, most, 0))[1]
    # the largest element of a block is from 64 to 127
    values = np.clip(np.rint(np.ldexp(blocks, 7 - exponents[:, None])), -LEVELS, LEVELS)
    exponents = np.where(is_finite, exponents, NO_NUMBER).astype(np.int16)
    return values.astype(np.int8).reshape(-1)[: x.size], exponents


def _decode_slab(values: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    is_finite = exponents != NO_NUMBER
    of_each = np.repeat(np.where(is_finite, exponents, 0) - 7, BLOCK)[: values.size]
    found = np.ldexp(values.astype(np.float32), of_each)
    found[~np.repeat(is_finite, BLOCK)[: values.size]] = np.nan
    return found


CODECS: Mapping[str, Codec] = {"bfloat16": BFloat16(), "int8": Int8()}
"""Name, as in `combine.CODECS` -> codec."""
