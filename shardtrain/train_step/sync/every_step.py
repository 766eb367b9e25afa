"""Combine the islands' gradients in every step, and update alike on all of them."""

from typing import Any

from shardtrain.functional.loss import Batch
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.sync.island_sync import Compute, IslandSync


class EveryStep(IslandSync):
    """Islands that combine their gradients in every step.

    Args:
      compute: what this island computes.
    """

    def __init__(self, compute: Compute) -> None:
        self._exchange = compute.exchange
        self.labels, self.keeps_state = self._exchange.labels, self._exchange.keeps_state

    def begin(self, state: State, sums: Any) -> State:
        """Return the state with that of the combiner, see `IslandSync`."""
        return state._replace(combine_state=self._exchange.init())

    def wanted(self, state: State, sums: Any) -> State:
        """Return the shapes of what `begin` returns, see `IslandSync`."""
        return state._replace(combine_state=self._exchange.wanted())

    def run(self, compute: Compute, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        return compute.step_together(state, batch)
