"""The step of one island among several: what it computes, and how it synchronises with the others.

Next: `island_compute.py` (an island with the whole model) and `stage_compute.py` (a pipeline stage), which
compute; `sync/`, the ways to synchronise.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shardtrain.functional.loss import Batch
from shardtrain.train_step.island_combiner import IslandCombiner
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import Metrics, State


class IslandStep(ABC):
    """The step of one island: (state, batch) -> (state, metrics); a subclass is a way to synchronise.

    Metrics are those of `step.make_step`, over all islands. With local steps the metrics of the loss come
    with the step that merges, and have count 0 until then; learning_rate, and grad_norm and skipped until
    then, are the island's own.

    Args:
      compute: what this island computes.
      combiners: the combiners whose states it keeps.

    Attributes:
      labels: names of the entries of a combiner's metric (L,).
      keeps_state: whether the combiner has a state.
    """

    def __init__(
        self, compute: IslandCompute | StageCompute, combiners: Sequence[IslandCombiner] = ()
    ) -> None:
        self.compute, self._combiners = compute, combiners
        self.labels = [label for each in combiners for label in each.labels]
        self.keeps_state = any(each.keeps_state for each in combiners)

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state before the first step with what this island needs for the exchange.

        Args:
          state: of `init_state`.
          batch: arrays or shapes.
        """
        combine_state = [each.init() for each in self._combiners]
        return state._replace(combine_state=combine_state or state.combine_state)

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns, for those of `init_state`."""
        combine_state = [each.wanted() for each in self._combiners]
        return state._replace(combine_state=combine_state or state.combine_state)

    @abstractmethod
    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step, and what follows it."""

    def close(self) -> None:
        """End the threads of this step."""
        self.compute.close()
