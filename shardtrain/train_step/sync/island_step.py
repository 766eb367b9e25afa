"""The step of one island among several: what it computes, and how it synchronises with the others.

Next: `island_compute.py` (an island with the whole model) and `stage_compute.py` (a pipeline stage), which
compute; `local_steps.py` (islands wait for each other to merge) and `waves.py` (islands run ahead).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.loss import Batch
from shardtrain.train_step.island_combiner import IslandCombiner
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.placement import attach_shardings, find_own_shardings
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import Local, Metrics, State, init_local, init_outer
from shardtrain.train_step.update import add_island_sums


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


class EveryStep(IslandStep):
    """Islands that combine their gradients in every step.

    Args:
      compute: what this island computes.
    """

    def __init__(self, compute: IslandCompute | StageCompute) -> None:
        super().__init__(compute, compute.exchange.combiners)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        return self.compute.step_together(state, batch)


class Merge(IslandStep):
    """Islands that merge what they changed in their own steps, and the part of the state that this needs.

    Args:
      compute: what this island computes.
      synchronisation: how islands are synchronised.
      fragments: the part of the parameters that each round merges.
      combiners: the combiner of each round; () if the merge uses none.

    Attributes:
      labels: names of the entries of a combiner's metric (L,); several rounds have none.
    """

    def __init__(
        self,
        compute: IslandCompute | StageCompute,
        synchronisation: Synchronisation,
        fragments: Sequence[Fragment],
        combiners: Sequence[IslandCombiner] = (),
    ) -> None:
        super().__init__(compute, combiners)
        self._synchronisation, self._fragments = synchronisation, fragments
        self.labels = self.labels if len(combiners) == 1 else []
        self._last: tuple[Any, int] = (None, 0)

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state with the fields of an island that has changed nothing yet, see `IslandStep`."""
        sums = self.compute.find_sum_shapes(state, batch)
        shardings = self.shardings(state, sums)
        create = jax.jit(self._create(sums), out_shardings=(shardings.local, shardings.outer_state))
        local, outer_state = create(state.params, state.model_state)
        return super().begin(state._replace(local=local, outer_state=outer_state), batch)

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns."""
        sums = self.compute.find_sum_shapes(state, batch)
        shardings = self.shardings(state, sums)
        shapes = jax.eval_shape(self._create(sums), state.params, state.model_state)
        local, outer_state = attach_shardings(shapes, (shardings.local, shardings.outer_state))
        return super().wanted(state._replace(local=local, outer_state=outer_state), batch)

    def shardings(self, state: State, sums: Any = ()) -> State:
        """Return the shardings of a state with what `begin` adds."""
        return find_own_shardings(self._synchronisation, self.compute.placement, state, sums)

    def _create(self, sums: Any) -> Callable[[Any, Any], tuple[Local, Any]]:
        def create(params: Any, model_state: Any) -> tuple[Local, Any]:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
            outer_state = init_outer(self._fragments, self._synchronisation.outer_optimizer, params)
            local = init_local(params, self._synchronisation, zeros)
            return local._replace(model_state=jax.tree.map(jnp.copy, model_state)), outer_state

        return create

    def steps_done(self, state: State) -> int:
        """Return the steps done; waits for the device only if the state is not the one returned last."""
        step, number = self._last
        if state.step is not step:
            number = int(state.step)
            self._restart(state, number)
        return number

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step, and the merge that may follow it; the first `synchronous_steps` average gradients."""
        compute, number = self.compute, self.steps_done(state) + 1
        is_local = not self._synchronisation.is_synchronous(number)
        if is_local:
            new, metrics = compute.step_alone(state._replace(combine_state=()), batch)
        else:
            # a mean keeps no arrays, so the shapes of its state are its state
            shapes = [each.wanted() for each in compute.exchange.combiners]
            plain = state._replace(combine_state=shapes, local=(), outer_state=())
            new, metrics = compute.step_together(plain, batch)
            # nothing was changed alone, and the model state is common
            own = state.local._replace(model_state=jax.tree.map(jnp.copy, new.model_state))
            new = new._replace(local=own, outer_state=state.outer_state)
        new, found = self.merge(new._replace(combine_state=state.combine_state), number)
        zeros = jax.tree.map(jnp.zeros_like, new.local.sums)
        return new, add_island_sums(metrics, found, zeros) if is_local else metrics

    @abstractmethod
    def merge(self, state: State, number: int) -> tuple[State, Metrics]:
        """Merge what is due after a step.

        Args:
          state: the state after the step.
          number: steps done.

        Returns:
          (the state after the merges, their metrics); if a round ends, "sums" has the sums over all islands.
        """

    @abstractmethod
    def _restart(self, state: State, number: int) -> None:
        """Forget what was under way: the run continues from a state that this merge has not returned."""
