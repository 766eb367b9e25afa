"""Partition a model's blocks into parts, find their owners, and reorder stacked blocks for a mesh.

The blocks of a stage are stored next to each other, each part padded with zeros to the size of the
largest: so one array, sharded over the axis pipeline, holds any partition. Checkpoints have the model's own
order (`restore_order`).
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
    """A model's blocks cut into num_chunks * num_stages parts, and the stage of each part.

    Args:
      num_stages: S.
      num_chunks: V, virtual stages of a stage.
      placement: which part each chunk of a stage is, a name of `part_placement.PLACEMENTS`.
      counts: blocks of each part, in the order of the model.

    >>> Partition(num_stages=2, num_chunks=1, counts=(1, 2)).stored_blocks
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
        """The stage and chunk of each part."""
        return PartPlacement(num_stages=self.num_stages, num_chunks=self.num_chunks, name=self.placement)

    @property
    def depth(self) -> int:
        """Stored blocks of each part: as many as the largest part has."""
        return max(self.counts)

    @property
    def num_blocks(self) -> int:
        """The number of all blocks."""
        return sum(self.counts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each part."""
        return tuple(accumulate(self.counts[:-1], initial=0))

    @cached_property
    def stored_blocks(self) -> tuple[int, ...]:
        """The block at each stored position, stage by stage; -1 for padding."""
        parts = [part for s in range(self.num_stages) for part in self.part_placement.parts(s)]
        return tuple(
            self.starts[part] + k if k < self.counts[part] else -1
            for part in parts
            for k in range(self.depth)
        )

    @property
    def is_plain(self) -> bool:
        """Whether blocks are stored in the order of the model, without zeros."""
        return self.stored_blocks == tuple(range(self.num_blocks))

    def store_blocks(self, x: Any) -> Any:
        """Convert an array of all blocks to the order in which the mesh stores it, padded with zeros.

        Args:
          x: (blocks, ...).
        """
        if self.is_plain:
            return x
        found = jnp.take(x, np.maximum(self.stored_blocks, 0), axis=0)
        real = np.asarray(self.stored_blocks).reshape(-1, *[1] * (x.ndim - 1)) >= 0
        return jnp.where(real, found, jnp.zeros((), x.dtype))

    def restore_order(self, x: Any) -> Any:
        """Convert a stored array to the order of the model, the reverse of `store_blocks`."""
        return x if self.is_plain else jnp.take(x, _find_positions(self.stored_blocks), axis=0)


def _find_positions(stored_blocks: Sequence[int]) -> np.ndarray:
    """Return the position of each block."""
    numbers = range(max(stored_blocks) + 1)
    return np.asarray([stored_blocks.index(number) for number in numbers], np.int32)


@dataclass(frozen=True, kw_only=True)
class OwnerGroup:
    """Blocks with the same owners.

    Args:
      stages: for each replica, the stage that owns the blocks.
      blocks: the numbers of the blocks, in order.
    """

    stages: tuple[int, ...]
    blocks: tuple[int, ...]


def owner_groups(cuts: Sequence[Partition]) -> tuple[OwnerGroup, ...]:
    """Return the groups of owners, in the order of their first blocks.

    If all replicas cut alike there is one group for each stage. All islands go through their groups in this
    order, so that none waits for another in a ring.

    Args:
      cuts: the partition of each replica.

    >>> cuts = [Partition(num_stages=2, counts=counts) for counts in ((1, 3), (3, 1))]
    >>> [(group.stages, group.blocks) for group in owner_groups(cuts)]
    [((0, 0), (0,)), ((1, 0), (1, 2)), ((1, 1), (3,))]
    """
    by_stages: dict[tuple[int, ...], list[int]] = {}
    owners = [_list_block_stages(cut) for cut in cuts]
    for block, stages in enumerate(zip(*owners, strict=True)):
        by_stages.setdefault(stages, []).append(block)
    return tuple(OwnerGroup(stages=stages, blocks=tuple(blocks)) for stages, blocks in by_stages.items())


def _list_block_stages(cut: Partition) -> list[int]:
    placement = cut.part_placement
    return [placement.stage(part) for part, count in enumerate(cut.counts) for _ in range(count)]
