"""How batches are loaded ahead of the step. Next: `workers.py`."""

from dataclasses import dataclass

from shardtrain.errors.field_types import too_small, wrong_types
from shardtrain.errors.messages import refuse


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How batches are loaded ahead. It changes no batch and no position.

    Args:
      prefetch: number of batches that are loaded ahead, each on a thread of its own, where loading one takes
        more than half a millisecond; quicker ones are loaded when they are asked for, as all are with 0.
      workers: number of processes that load batches, for data in Python that holds its lock; 0: threads of
        the run's own process do. Each keeps the data's objects in its memory.
      heldout_workers: number of processes that load held-out batches, which start at each evaluation, in a
        second or two; 0: threads do.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    prefetch: int = 2
    workers: int = 0
    heldout_workers: int = 0

    def __post_init__(self) -> None:
        problems = wrong_types(self) + too_small(self, prefetch=0, workers=0, heldout_workers=0)
        refuse("batches cannot be loaded in this way", problems)
