"""The step of an island's own optimizer, some of which end with a merge of what islands changed.

In the first, synchronous steps islands average their gradients instead. Next: `island_merge.py` and
`wave_merge.py`, the merges; `local_steps.py`, the arithmetic.
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
from shardtrain.train_step.island_merge import IslandMerge
from shardtrain.train_step.island_totals import add_island_sums, shapes_of_sums, step_sums
from shardtrain.train_step.local_steps import make_local_update, own_params
from shardtrain.train_step.loss_scale import scale_of
from shardtrain.train_step.own_state import drop_local_fields, restore_local_fields
from shardtrain.train_step.placement import Placement, constrain
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, keep_unless_skipped
from shardtrain.train_step.wave_merge import WaveMerge

if TYPE_CHECKING:
    from shardtrain.train_step.island_step import GradientIslandStep  # it imports this file


class DeltaIslandStep:
    """A step of the island's own optimizer; some end with a merge. See `island_step.GradientIslandStep`."""

    def __init__(
        self,
        *,
        gradients: Callable[..., Sums],
        first_row: int,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        merge: IslandMerge | WaveMerge,
        learning_rate: optax.Schedule | None,
        synchronous: "GradientIslandStep | None" = None,
        synchronous_steps: int = 0,
    ) -> None:
        self._gradients, self.first_row, self._merge = gradients, np.uint32(first_row), merge
        self._synchronous, self._synchronous_steps = synchronous, synchronous_steps
        self.labels, self.keeps_state = self._merge.labels, self._merge.keeps_state
        specs, mesh = placement.specs, placement.mesh
        whole = NamedSharding(mesh, PartitionSpec())
        own_update = make_local_update(optimizer)

        def step(state: State, batch: Batch, first_row: jax.Array) -> tuple[State, Metrics]:
            local = state.local
            own = constrain(own_params(state.params, local.drift), specs.params, mesh)
            key, scale = step_key(state.seed, state.step), scale_of(state.loss_scale)
            found = gradients(own, local.model_state, key, batch, first_row, scale)

            def update_state(state: State) -> State:
                params, local = constrain(state.params, specs.sharded, mesh), state.local
                opt_state, drift = own_update(
                    params, local.drift, state.opt_state, found.grads, found.count, found.mean_loss
                )
                local = local._replace(
                    drift=drift, count=local.count + found.count, model_state=found.model_state
                )
                return state._replace(opt_state=opt_state, local=local)

            metrics = {**found.logged, "grad_norm": optax.tree.norm(found.grads)}
            new, metrics = keep_unless_skipped(update_state, placement, state, metrics, learning_rate)
            sums = jax.tree.map(jnp.add, local.sums, step_sums(metrics))
            new = new._replace(local=new.local._replace(sums=sums))
            shardings = self._merge.shardings(placement.state, sums)._replace(combine_state=())
            return jax.lax.with_sharding_constraint(new, shardings), metrics

        self._step = jax.jit(
            step,
            in_shardings=(None, placement.batch, whole),
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
        return shapes_of_sums(found.metrics)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run one step."""
        number = self._merge.steps_done(state) + 1
        # the combiner's state is no part of the local step's program
        combine_state, state = state.combine_state, state._replace(combine_state=())
        is_local = self._synchronous is None or number > self._synchronous_steps
        if is_local:
            new, metrics = self._step(state, batch, self.first_row)
        else:
            new, metrics = self._synchronous_step(state, batch)
        new, found = self._merge.merge(new._replace(combine_state=combine_state), number)
        zeros = jax.tree.map(jnp.zeros_like, new.local.sums)
        return new, add_island_sums(metrics, found, zeros) if is_local else metrics

    def _synchronous_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Run a step that averages the islands' gradients; nothing changes that is an island's own."""
        assert self._synchronous is not None
        self._synchronous.first_row = self.first_row
        # a mean keeps no arrays, so the shapes of its state are its state
        plain = drop_local_fields(state, self._synchronous.wanted(state, batch).combine_state)
        new, metrics = self._synchronous(plain, batch)
        return restore_local_fields(new, state), metrics

    def lowered(self, state: State, batch: Batch) -> list[jax.stages.Lowered]:
        """Return the program of a local step, see `island_step.GradientIslandStep.lowered`."""
        return [self._step.lower(state._replace(combine_state=()), batch, self.first_row)]

    def close(self) -> None:
        """End what the merge keeps open, see `island_step.IslandStep`."""
        self._merge.close()
