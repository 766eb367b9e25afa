"""The arrays of a sum, packed into a flat one for each dtype and cut into chunks. Next: `ring.py`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np

from shardtrain.elastic.codecs import CODECS, Arrays, Codec, Plain


class Packing:
    """The places of arrays in flat ones, one for each dtype: many small messages cost more than a large one.

    Args:
      like: arrays, or their shapes and dtypes.
      codecs: the name of the codec of each float32 array, see `CODECS`; "" for none. () for none at all.

    Attributes:
      like: the flat arrays without memory.
      codecs: the codec of each.

    >>> packing = Packing([np.zeros((2, 2)), np.float32(3), np.zeros(3)])
    >>> [(x.dtype.name, x.shape) for x in packing.make_zeros()]
    [('float64', (7,)), ('float32', (1,))]
    """

    def __init__(self, like: Sequence[Any], codecs: Sequence[str] = ()) -> None:
        dtypes = (np.dtype(x.dtype) for x in like)
        self._kinds = list(zip(dtypes, codecs or [""] * len(like), strict=True))
        self._shapes = [tuple(np.shape(x)) for x in like]
        self._flat = {kind: CODECS[kind[1]] if kind[1] else Plain(kind[0]) for kind in self._kinds}
        self.codecs = list(self._flat.values())
        # the elements of a block are of one array
        pairs = zip(self._shapes, (self._flat[kind].block for kind in self._kinds), strict=True)
        self._sizes = [-(-math.prod(shape) // block) * block for shape, block in pairs]
        self.like = []
        for kind in self._flat:
            size = sum(size for size, of in zip(self._sizes, self._kinds, strict=True) if of == kind)
            self.like.append(np.broadcast_to(np.zeros((), kind[0]), size))

    def make_zeros(self) -> Arrays:
        """Return the flat arrays, of zeros."""
        return [np.zeros(x.shape, x.dtype) for x in self.like]

    def view(self, flat: Arrays) -> Arrays:
        """Return the arrays as views of the flat ones."""
        found: dict[int, np.ndarray] = {}
        for kind, whole in zip(self._flat, flat, strict=True):
            own = [i for i, of in enumerate(self._kinds) if of == kind]
            ends = list(accumulate(self._sizes[i] for i in own))
            for i, end in zip(own, ends, strict=True):
                start, shape = end - self._sizes[i], self._shapes[i]
                found[i] = whole[start : start + math.prod(shape)].reshape(shape)
        return [found[i] for i in range(len(found))]


class FlatSum:
    """A sum of arrays, each cut into chunks; an `OwnSum` and a `Sum` of `ring.py`.

    Args:
      arrays: contiguous.
      codecs: the codec of each array.
      num_chunks: number of chunks.
    """

    def __init__(self, arrays: Arrays, codecs: Sequence[Codec], num_chunks: int = 1) -> None:
        self.arrays, self._codecs, self.num_chunks = arrays, codecs, num_chunks

    def copy(self, num_chunks: int) -> "FlatSum":
        return FlatSum([x.copy() for x in self.arrays], self._codecs, num_chunks)

    def chunk(self, index: int) -> "Part":
        # no copy, though sockets read it later: it is replaced by a sum that the next member adds it to first
        parts = zip(self._codecs, self._cut(index), strict=True)
        encoded = [x for codec, part in parts for x in codec.encode(part)]
        return Part(encoded, index, self.num_chunks)

    def finish(self, index: int) -> None:
        self.replace(index, self.chunk(index))

    def add(self, index: int, payload: "Part") -> None:
        for mine, theirs in self._match(index, payload):
            mine += theirs

    def replace(self, index: int, payload: "Part") -> None:
        for mine, theirs in self._match(index, payload):
            mine[...] = theirs

    def _match(self, index: int, payload: "Part") -> Iterable[tuple[np.ndarray, np.ndarray]]:
        if (payload.index, payload.num) != (index, self.num_chunks):
            raise ValueError(
                f"part {payload.index} of {payload.num} of a sum was sent where part {index} of"
                f" {self.num_chunks} is due; all islands must run the same version"
            )
        return zip(self._cut(index), decode_all(self._codecs, payload.arrays), strict=True)

    def _cut(self, index: int) -> Arrays:
        return cut_chunk(self.arrays, index, self.num_chunks, [codec.block for codec in self._codecs])


def decode_all(codecs: Sequence[Codec], encoded: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the arrays of a chunk, given what their codecs made of them, one after the other."""
    left = iter(encoded)
    for codec in codecs:
        yield codec.decode(list(islice(left, codec.num_arrays)))


@dataclass(frozen=True, eq=False)
class Part:
    """Part `index` of `num` equal parts of each array of a sum."""

    arrays: Arrays
    index: int = 0
    num: int = 1


def cut_chunk(arrays: Arrays, index: int, num_chunks: int, blocks: Sequence[int]) -> Arrays:
    """Return a chunk of each array, a view of it, cut between its blocks of so many elements.

    >>> [len(cut_chunk([np.zeros(7)], index, 3, [1])[0]) for index in range(3)]
    [2, 2, 3]
    >>> [len(cut_chunk([np.zeros(8)], index, 3, [2])[0]) for index in range(3)]
    [2, 2, 4]
    """
    found = []
    for x, block in zip(arrays, blocks, strict=True):
        flat = x.reshape(-1)
        start, end = (each * (flat.size // block) // num_chunks * block for each in (index, index + 1))
        found.append(flat[start:end])
    return found
