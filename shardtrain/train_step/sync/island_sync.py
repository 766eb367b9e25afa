"""Base of all ways in which islands synchronise: the state that one needs, and how it runs a step.

A new one is a subclass. `every_step.py` is the shortest; next: `merge.py`, what all others share.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from shardtrain.functional.loss import Batch
from shardtrain.train_step.state import Metrics, State


class GradientExchange(Protocol):
    """Combines gradients over islands.

    Attributes:
      labels: names of the entries of a combiner's metric (L,).
      keeps_state: whether the combiner has a state.
    """

    labels: list[str]
    keeps_state: bool

    def init(self) -> list[Any]:
        """Create the combiner's state."""
        ...

    def wanted(self) -> list[Any]:
        """Return the shapes, dtypes and shardings of the combiner's state."""
        ...


class Compute(Protocol):
    """What an island computes of its own rows, and the two ways to update its part of the parameters."""

    @property
    def exchange(self) -> GradientExchange:
        """The exchange of gradients, of a synchronisation that combines them in some steps."""
        ...

    def step_together(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run a step that combines gradients with the other islands, and updates alike on all of them."""
        ...

    def step_alone(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run a step of this island's own optimizer; the state has no `combine_state`."""
        ...


class IslandSync(ABC):
    """How an island synchronises with the others.

    Attributes:
      labels: names of the entries of a combiner's metric (L,).
      keeps_state: whether a combiner has a state.
    """

    labels: Sequence[str]
    keeps_state: bool

    @abstractmethod
    def begin(self, state: State, sums: Any) -> State:
        """Return the state before the first step with what this needs.

        Args:
          state: the state of this island.
          sums: shapes of what is added up between merges.
        """

    @abstractmethod
    def wanted(self, state: State, sums: Any) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns."""

    @abstractmethod
    def run(self, compute: Compute, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step, and what follows it.

        Args:
          compute: what this island computes.
          state: the state before the step.
          batch: the batch of this island.
        """

    def close(self) -> None:
        """End the threads of this object, if it has any."""
        return
