"""The part of the state that an island changes alone between merges: created, described, and sharded.

Next: `island_merge.py` and `wave_merge.py`, which use it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import Fragment
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.train_step.placement import Placement, outer_specs
from shardtrain.train_step.replica_state import init_local, init_outer, local_layout
from shardtrain.train_step.state import Local, State


def drop_local_fields(state: State, combine_state: Any) -> State:
    """Return the state as a step has it that combines gradients.

    Args:
      state: that of an island that has changed nothing alone.
      combine_state: that of the combiner of gradients.
    """
    return state._replace(combine_state=combine_state, local=(), outer_state=())


def restore_local_fields(new: State, state: State) -> State:
    """Return the state of `drop_local_fields` after a step, with what that one left out of `state`."""
    local = state.local._replace(model_state=jax.tree.map(jnp.copy, new.model_state))
    return new._replace(combine_state=state.combine_state, local=local, outer_state=state.outer_state)


class OwnState:
    """What `State.local` and `State.outer_state` of one island are.

    Args:
      synchronisation: how islands are synchronised.
      placement: the placement of the parameters on this island.
      fragments: the parts of the parameters that are merged in turn.
    """

    def __init__(
        self, synchronisation: Synchronisation, placement: Placement, fragments: Sequence[Fragment]
    ) -> None:
        self._synchronisation, self._placement, self._fragments = synchronisation, placement, fragments

    def begin(self, state: State, sums: Any = ()) -> State:
        """Return the state with that of an island that has changed nothing.

        Args:
          state: the state of this island.
          sums: shapes of what is added up between merges.
        """
        shardings = self.shardings(state, sums)
        create = jax.jit(
            lambda params, model_state: self._create(params, model_state, sums),
            out_shardings=(shardings.local, shardings.outer_state),
        )
        local, outer_state = create(state.params, state.model_state)
        return state._replace(local=local, outer_state=outer_state)

    def wanted(self, state: State, sums: Any = ()) -> State:
        """Return the shapes, dtypes and shardings of what `begin` returns."""
        shardings = self.shardings(state, sums)
        local, outer_state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(
                lambda params, model_state: self._create(params, model_state, sums),
                state.params,
                state.model_state,
            ),
            (shardings.local, shardings.outer_state),
        )
        return state._replace(local=local, outer_state=outer_state)

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
        local = local_layout(self._synchronisation, drift, whole, jax.tree.map(lambda _: whole, sums))
        local = local._replace(model_state=jax.tree.map(lambda _: whole, state.model_state))
        return state._replace(combine_state=whole, local=local, outer_state=outer)

    def _create(self, params: Any, model_state: Any, sums: Any) -> tuple[Local, Any]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        outer_state = init_outer(self._fragments, self._synchronisation.outer_optimizer, params)
        local = init_local(params, self._synchronisation, zeros)
        return local._replace(model_state=jax.tree.map(jnp.copy, model_state)), outer_state
