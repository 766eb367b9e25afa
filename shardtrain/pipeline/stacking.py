"""How the blocks of a model are cut into parts, and in which order a mesh stores stacked blocks.

Each stage holds its own blocks next to each other, as many rows as the largest part has: so one array,
sharded over the axis pipeline, holds any cut. What is saved is the model's own order (`in_order`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardtrain.pipeline.part_placement import PartPlacement


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A model's blocks cut into num_chunks * num_stages parts, and the stages that hold them.

    Args:
      num_stages: S.
      num_chunks: V, virtual stages of a stage.
      placement: which part each chunk of a stage is, a name of `part_placement.PLACEMENTS`.
      counts: blocks of each part, in the order of the model.

    >>> Partition(num_stages=2, num_chunks=1, counts=(1, 2)).rows
    (0, -1, 1, 2)
    """

    num_stages: int
    num_chunks: int = 1
    placement: str = "loop"
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.counts) == self.part_placement.num_parts

    @cached_property
    def part_placement(self) -> PartPlacement:
        """Which part each chunk of a stage is."""
        return PartPlacement(num_stages=self.num_stages, num_chunks=self.num_chunks, name=self.placement)

    @property
    def depth(self) -> int:
        """Rows that each part is given: the blocks of the largest."""
        return max(self.counts)

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return sum(self.counts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each part."""
        return tuple(accumulate(self.counts[:-1], initial=0))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The block of each stored row; -1 where a row is filled up with zeros."""
        parts = [part for s in range(self.num_stages) for part in self.part_placement.parts(s)]
        return tuple(
            self.starts[part] + k if k < self.counts[part] else -1
            for part in parts
            for k in range(self.depth)
        )

    @property
    def is_plain(self) -> bool:
        """The stored order is that of the model."""
        return self.rows == tuple(range(self.num_blocks))

    def stored(self, x: Any, dim: int = 0) -> Any:
        """An array of all blocks, as the mesh stores it.

        Args:
          x: (..., blocks, ...).
          dim: which dim counts blocks.
        """
        if self.is_plain:
            return x
        found = jnp.take(x, np.maximum(self.rows, 0), axis=dim)
        real = np.asarray(self.rows).reshape(-1, *[1] * (x.ndim - dim - 1)) >= 0
        return jnp.where(real, found, jnp.zeros((), x.dtype))

    def in_order(self, x: Any, dim: int = 0) -> Any:
        """The reverse of `stored`."""
        return x if self.is_plain else jnp.take(x, _places(self.rows), axis=dim)


def _places(rows: Sequence[int]) -> np.ndarray:
    """Where each block is stored."""
    return np.asarray([rows.index(block) for block in range(max(rows) + 1)], np.int32)
