"""Group blocks by the stages that own them, if the replicas of a pipeline cut a model differently. No jax.

Each block has one owner in each replica. Next: `train_step/owner_transfers.py`, which combines the gradients
of a group among its owners.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.pipeline.stacking import Partition


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
