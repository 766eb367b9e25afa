"""Merge what islands changed in their local steps, fragment by fragment, and start the next round from it.

Islands here are replicas: whole ones, or the same stage of several pipelines. Next: `local_steps.py` (the
arithmetic), `island_combiner.py` (the exchange).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.island_combiner import IslandCombiner, joined_metrics
from shardtrain.train_step.island_totals import Totals, all_reduce_totals, average_model_state
from shardtrain.train_step.local_steps import merged, next_round
from shardtrain.train_step.placement import Placement, outer_specs
from shardtrain.train_step.replica_state import fragments_of, init_local, init_outer
from shardtrain.train_step.state import Local, State
from shardtrain.train_step.step import Metrics


class IslandMerge:
    """The merge of islands at the end of some steps, by a synchronisation on deltas.

    Args:
      synchronisation: when, by which combiner, with which outer optimizer.
      placement: the placement of the parameters on this island.
      transfer: to the other islands.
      barrier: called with a name before each exchange.
    """

    def __init__(
        self,
        synchronisation: Synchronisation,
        placement: Placement,
        transfer: Transfer,
        barrier: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._synchronisation, self._placement = synchronisation, placement
        self._transfer, self._barrier = transfer, barrier
        self._fragments = fragments_of(synchronisation, placement.specs)
        params = placement.specs.abstract.params
        self._combiners = [
            IslandCombiner(synchronisation.combiner, placement, transfer, each.take(params))
            for each in self._fragments
        ]
        outer = synchronisation.outer_optimizer
        found = self.shardings(placement.state)
        of_state = (found.params, found.local.drift, found.local.count, found.outer_state)
        self._take = [jax.jit(partial(_take, each, number)) for number, each in enumerate(self._fragments)]
        self._merge = [
            jax.jit(partial(_merge, each, number, outer), out_shardings=of_state)
            for number, each in enumerate(self._fragments)
        ]
        self._last: tuple[Any, int] = (None, 0)

    @property
    def labels(self) -> list[str]:
        """Names of the entries of a combiner's metric (L,); of several fragments there is none."""
        return self._combiners[0].labels if len(self._combiners) == 1 else []

    @property
    def keeps_state(self) -> bool:
        """Whether the combiner has a state."""
        return any(combiner.keeps_state for combiner in self._combiners)

    def begin(self, state: State, sums: Any = ()) -> State:
        """Return a state of which nothing was changed yet, with what the merge needs in it.

        Args:
          state: the state of this island.
          sums: shapes of what is added up between merges.
        """
        shardings = self.shardings(state, sums)
        create = jax.jit(
            lambda params: self._create(params, sums),
            out_shardings=(shardings.local, shardings.outer_state),
        )
        local, outer_state = create(state.params)
        combine_state = [combiner.init() for combiner in self._combiners]
        return state._replace(combine_state=combine_state, local=local, outer_state=outer_state)

    def wanted(self, state: State, sums: Any = ()) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns."""
        shardings = self.shardings(state, sums)
        local, outer_state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda params: self._create(params, sums), state.params),
            (shardings.local, shardings.outer_state),
        )
        combine_state = [combiner.wanted() for combiner in self._combiners]
        return state._replace(combine_state=combine_state, local=local, outer_state=outer_state)

    def _create(self, params: Any, sums: Any) -> tuple[Local, Any]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        outer_state = init_outer(self._fragments, self._synchronisation.outer_optimizer, params)
        return init_local(params, len(self._fragments), zeros), outer_state

    def shardings(self, state: State, sums: Any = ()) -> State:
        """Return the shardings of a state with what `begin` adds."""
        mesh, specs = self._placement.mesh, self._placement.specs
        whole = NamedSharding(mesh, PartitionSpec())
        outer = outer_specs(self._fragments, self._synchronisation, specs)
        drift, outer = (
            jax.tree.map(
                lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
            )
            for tree in (specs.sharded, outer)
        )
        local = Local(drift, whole, jax.tree.map(lambda _: whole, sums))
        return state._replace(combine_state=whole, local=local, outer_state=outer)

    def steps_done(self, state: State) -> int:
        """Return the steps done; waits for the device only if the state is not the one returned last."""
        step, number = self._last
        return number if state.step is step else int(state.step)

    def merge(self, state: State, number: int) -> tuple[State, Metrics | None]:
        """Combine the fragments that are due after a step, and give the result to the outer optimizer.

        Args:
          state: the state after the step.
          number: steps done.

        Returns:
          (the state after the merges, the metrics); the metrics are None unless a round of all fragments
          has ended: then they have the sums over all islands under "sums".
        """
        metrics: Metrics | None = None
        for fragment in self._synchronisation.due(number):
            combiner = self._combiners[fragment]
            local = state.local
            deltas, count = jax.block_until_ready(self._take[fragment](local.drift, local.count))
            self._barrier("combine deltas")
            started = combiner.start(deltas, count, state.combine_state[fragment])
            if fragment == len(self._fragments) - 1:
                metrics, state = self._round_totals(state)
            combined = combiner.finish(deltas, started)
            combine_state = [*state.combine_state]
            combine_state[fragment] = combined.state
            params, drift, counts, outer_state = self._merge[fragment](
                state.params, local.drift, local.count, state.outer_state, combined.value
            )
            state = state._replace(
                params=params,
                local=state.local._replace(drift=drift, count=counts),
                outer_state=outer_state,
                combine_state=combine_state,
            )
            if metrics is not None:
                found = joined_metrics(combined.metrics)
                whole = len(self._fragments) == 1
                metrics |= {name: x for name, x in found.items() if whole or not x.ndim}
        self._last = (state.step, number)
        return state, metrics

    def _round_totals(self, state: State) -> tuple[Metrics, State]:
        """Add up the sums of all islands, average their model states, and begin the sums anew."""
        sums = state.local.sums
        if not jax.tree.leaves(sums):
            count = state.local.count[-1]
            return {}, state._replace(
                model_state=average_model_state(self._transfer, state.model_state, count)
            )
        totals = all_reduce_totals(self._transfer, Totals(sums, state.model_state), sums["count"])
        local = state.local._replace(sums=jax.tree.map(jnp.zeros_like, sums))
        return {"sums": totals.sums}, state._replace(model_state=totals.model_state, local=local)


def _take(
    fragment: Fragment, number: int, drift: Any, count: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return what a replica has changed of a fragment, and the number of examples since its last merge."""
    return fragment.take(drift), count[number]


def _merge(
    fragment: Fragment,
    number: int,
    outer: optax.GradientTransformation | None,
    params: Any,
    drift: Any,
    count: jax.Array,
    outer_state: Any,
    combined: Any,
) -> tuple[Any, ...]:
    """Return (params, drift, count, outer state of all fragments) after a fragment was combined."""
    own = outer_state[number] if outer is not None else ()
    params, own = merged(fragment, outer, params, combined, own)
    local = next_round(fragment, number, Local(drift, count))
    if outer is not None:
        outer_state = (*outer_state[:number], own, *outer_state[number + 1 :])
    return params, local.drift, local.count, outer_state
