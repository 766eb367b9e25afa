"""The step of a pipeline stage for an elastic run, whose islands are pipelines of several processes.

Next: `elastic/group.py`, whose first process asks for slots and for updates.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.data.batches import Batches
from shardtrain.elastic.codecs import CODECS
from shardtrain.train_step.slot_rows import SlotProgram, SlotRows
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import State


class ElasticStages(SlotProgram):
    """What the stage of this process does in an elastic run; all stages of the island make the same calls.

    It has what `ElasticProgram` has, for the arrays of the stage.

    Args:
      stage: what the stage computes, for the rows of a slot.
      batches: the whole batches, equal on all islands, from their first one on.
      num_slots: number of slots of a batch.
      microbatches: number of parts of a slot.
      state: the state before the first step; its arrays keep their shardings.
      codec: how gradients are sent, of `elastic.codecs.CODECS`; "" sends them as they are.

    Attributes:
      state: the state of the stage after the steps so far.
      metrics, codecs, recent: see `ElasticProgram`.
    """

    def __init__(
        self,
        stage: StageCompute,
        batches: Batches,
        num_slots: int,
        microbatches: int,
        state: State,
        codec: str = "",
    ) -> None:
        assert codec in ("", *CODECS), codec
        self._stage, self._codec = stage, codec
        rows = SlotRows(batches, num_slots, stage.placement, microbatches)
        super().__init__(rows, state, jax.tree.map(lambda x: x.sharding, state))
        self._add = jax.jit(lambda total, more: jax.tree.map(jnp.add, total, more), donate_argnums=0)
        self.codecs: Any = ()

    def compute(self, step: int, slots: Sequence[int], batches: range | None = None) -> Any:
        """Return the sums of some slots, see `ElasticProgram.compute` and `StageCompute.sum_gradients`."""
        total = None
        for _, first_row, rows in self._rows.iterate(step, slots, batches):
            found = self._stage.sum_gradients(self.state, next(rows), int(first_row))
            total = found if total is None else self._add(total, found)
        assert total is not None
        self.codecs = {
            "grads": jax.tree.map(lambda _: self._codec, total["grads"]),
            "losses": jax.tree.map(lambda _: "", total["losses"]),
        }
        return total

    def apply(self, step: int, total: Any) -> None:
        """Update the state by the sums over a whole batch."""
        self._state, self.metrics = self._stage.update_by_sums(self.state, total)
        self.recent.append((step + 1, self.metrics))
