"""The step in which an island runs its own optimizer, some of which end with a merge of what islands changed.

In the first, synchronous steps islands average their gradients instead. Next: `merge.py`, the merges;
`local_steps.py`, the arithmetic.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional.loss import Batch
from shardtrain.functional.rng import step_key
from shardtrain.functional.sums import Sums
from shardtrain.train_step.island_totals import find_sum_shapes, make_step_sums
from shardtrain.train_step.local_steps import make_local_update, make_own_params
from shardtrain.train_step.loss_scale import get_scale
from shardtrain.train_step.merge import Merge
from shardtrain.train_step.placement import Placement, constrain
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, keep_unless_skipped

if TYPE_CHECKING:
    from shardtrain.train_step.island_step import GradientIslandStep  # it imports this file

OwnUpdate = Callable[[State, Sums, jax.Array], tuple[State, Metrics]]
"""(state, sums of the batch with the gradient of the mean loss, its norm) -> (state, metrics), in a jit."""


def make_own_update(
    optimizer: optax.GradientTransformation, placement: Placement, learning_rate: optax.Schedule | None
) -> OwnUpdate:
    """Make the update of an island's own optimizer, which also adds up metrics until the next merge.

    Args:
      optimizer: the optimizer.
      placement: the placement of the state.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
    """
    local_update = make_local_update(optimizer)

    def update(state: State, found: Sums, norm: jax.Array) -> tuple[State, Metrics]:
        def updated(state: State) -> State:
            params = constrain(state.params, placement.specs.sharded, placement.mesh)
            local = state.local
            opt_state, drift = local_update(
                params, local.drift, state.opt_state, found.grads, found.count, found.mean_loss
            )
            local = local._replace(
                drift=drift, count=local.count + found.count, model_state=found.model_state
            )
            return state._replace(opt_state=opt_state, local=local)

        metrics = {**found.logged, "grad_norm": norm}
        new, metrics = keep_unless_skipped(updated, placement, state, metrics, learning_rate)
        sums = jax.tree.map(jnp.add, state.local.sums, make_step_sums(metrics))
        return new._replace(local=new.local._replace(sums=sums)), metrics

    return update


class DeltaIslandStep:
    """A step of an island's own optimizer, and the merge that may follow it; an `island_step.IslandStep`.

    Args:
      gradients: computes the gradient of the mean loss, see `make_gradients`.
      first_row: the number of this island's first row in the whole batch.
      optimizer, placement, learning_rate: see `make_own_update`.
      merge: the merge with the other islands.
      synchronous: the step that averages gradients in the first steps; None if there are no such steps.
    """

    def __init__(
        self,
        *,
        gradients: Callable[..., Sums],
        first_row: int,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        merge: Merge,
        learning_rate: optax.Schedule | None,
        synchronous: "GradientIslandStep | None" = None,
    ) -> None:
        self._gradients, self.first_row, self._merge = gradients, np.uint32(first_row), merge
        self._synchronous = synchronous
        self.labels, self.keeps_state = merge.labels, merge.keeps_state
        specs, mesh = placement.specs, placement.mesh
        update = make_own_update(optimizer, placement, learning_rate)

        def step(state: State, batch: Batch, first_row: jax.Array) -> tuple[State, Metrics]:
            own = constrain(make_own_params(state.params, state.local.drift), specs.params, mesh)
            key, scale = step_key(state.seed, state.step), get_scale(state.loss_scale)
            found = gradients(own, state.local.model_state, key, batch, first_row, scale)
            new, metrics = update(state, found, optax.tree.norm(found.grads))
            shardings = merge.shardings(placement.state, new.local.sums)._replace(combine_state=())
            return jax.lax.with_sharding_constraint(new, shardings), metrics

        self._step = jax.jit(
            step,
            in_shardings=(None, placement.batch, NamedSharding(mesh, PartitionSpec())),
            donate_argnums=0,
            compiler_options=placement.compiler_options,
        )

    def begin(self, state: State, batch: Batch) -> State:
        """Return the state with what this island changes alone, see `island_step.IslandStep`."""
        return self._merge.begin(state, self._sums(state, batch))

    def wanted(self, state: State, batch: Batch) -> State:
        """Return the shapes of what `begin` returns, see `island_step.IslandStep`."""
        return self._merge.wanted(state, self._sums(state, batch))

    def _sums(self, state: State, batch: Batch) -> Any:
        """Return the shapes of the sums over steps."""
        found = jax.eval_shape(
            self._gradients, state.params, state.model_state, step_key(jnp.uint32(0), jnp.int32(0)), batch
        )
        return find_sum_shapes(found.metrics)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""

        def synchronous(plain: State) -> tuple[State, Metrics]:
            assert self._synchronous is not None
            self._synchronous.first_row = self.first_row
            # a mean keeps no arrays, so the shapes of its state are its state
            return self._synchronous(self._synchronous.wanted(plain, batch), batch)

        return self._merge.run(state, lambda own: self._step(own, batch, self.first_row), synchronous)

    def lowered(self, state: State, batch: Batch) -> list[jax.stages.Lowered]:
        """Return the program of a local step, see `island_step.GradientIslandStep.lowered`."""
        return [self._step.lower(state._replace(combine_state=()), batch, self.first_row)]

    def close(self) -> None:
        """End the threads of the merge, see `island_step.IslandStep`."""
        self._merge.close()
