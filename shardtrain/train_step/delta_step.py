"""The step of a mesh in which each replica has its own optimizer, and some steps merge what they changed.

Next: `local_steps.py`, the arithmetic; `step.py`, which compiles it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain import axes
from shardtrain.combine.replicas import combine_replicas, stacked_paths
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.sharding.specs import with_leading_dim
from shardtrain.train_step.gradients import make_replica_means
from shardtrain.train_step.local_steps import make_local_update, merged, next_round
from shardtrain.train_step.placement import Placement, constrain
from shardtrain.train_step.replica_state import fragments_of, init_local
from shardtrain.train_step.state import Local, Metrics, State


def make_delta_update(
    model: Model, loss: Loss, optimizer: optax.GradientTransformation, placement: Placement, start_row: int
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Make the step in which each replica has its own optimizer, and deltas are combined.

    With Adasum this is Horovod's `_DistributedAdasumOptimizer`.
    """
    replica_means = make_replica_means(model, loss, placement, start_row)
    specs, mesh, synchronisation = placement.specs, placement.mesh, placement.synchronisation
    own_specs = with_leading_dim(specs.sharded, axes.DATA)
    # one optimizer per replica, over the leading dim of replicas
    own_update = jax.vmap(
        make_local_update(optimizer), in_axes=(None, 0, 0, 0, 0, 0), spmd_axis_name=axes.DATA
    )
    num_replicas = mesh.shape[axes.DATA]
    merge = _make_merge(placement)

    def update(state: State, batch: Batch) -> tuple[State, Metrics]:
        found, means, counts, values = replica_means(state, batch)
        params = constrain(state.params, specs.sharded, mesh)
        local = state.local
        if synchronisation.every == 1:
            local = init_local(params, 1, lead=(num_replicas,))
        drift = constrain(local.drift, own_specs, mesh)
        opt_state, drift = own_update(params, drift, state.opt_state, means, counts, values)
        local = Local(constrain(drift, own_specs, mesh), local.count + counts[:, None])
        state = state._replace(params=params, model_state=found.model_state, opt_state=opt_state, local=local)
        state, extra = merge(state)
        if synchronisation.every == 1:
            state = state._replace(local=())
        # there is no common gradient: log the mean over the replicas' own
        squares = sum((m.astype(jnp.float32) ** 2).sum() for m in jax.tree.leaves(means)) / num_replicas
        metrics = {"loss_sum": found.loss_sum, "count": found.count, "grad_norm": jnp.sqrt(squares)}
        return state, {**found.metrics, **metrics, **extra}

    return update


def _make_merge(placement: Placement) -> Callable[[State], tuple[State, Metrics]]:
    """Make the function that combines the drifts of the fragments that are due at the end of a step.

    It returns the state after combining, and the combiner's metrics, NaN where nothing was combined.
    """
    specs, synchronisation = placement.specs, placement.synchronisation
    stacked = stacked_paths(specs.arrays, specs.sharded)
    fragments = fragments_of(synchronisation, specs)
    outer = synchronisation.outer_optimizer

    def merge_fragment(number: int, state: State) -> tuple[State, Metrics]:
        fragment = fragments[number]
        combined, combine_state, extra = combine_replicas(
            synchronisation.combiner,
            fragment.take(state.local.drift, lead=1),
            state.local.count[:, number],
            state.combine_state[number],
            specs=fragment.select(specs.sharded),
            stacked=stacked & fragment.rows.keys(),
            mesh=placement.mesh,
        )
        outer_state = state.outer_state[number] if outer is not None else ()
        params, outer_state = merged(fragment, outer, state.params, combined, outer_state)
        state = state._replace(
            params=params,
            local=next_round(fragment, number, state.local, lead=1),
            combine_state=_with_item(state.combine_state, number, combine_state),
            outer_state=_with_item(state.outer_state, number, outer_state) if outer is not None else (),
        )
        # metrics (L,) are of all parameters
        whole = len(fragments) == 1
        return state, {name: x for name, x in extra.items() if whole or not x.ndim}

    def merge(state: State) -> tuple[State, Metrics]:
        if synchronisation.every == 1:
            return merge_fragment(0, state)
        metrics = jax.tree.map(
            lambda x: jnp.full(x.shape, jnp.nan, x.dtype),
            jax.eval_shape(partial(merge_fragment, 0), state)[1],
        )
        for number in range(len(fragments)):
            due = (state.step + 1) % synchronisation.every == synchronisation.phase(number)
            state, metrics = jax.lax.cond(
                due,
                lambda state, _, number=number: merge_fragment(number, state),
                lambda state, metrics: (state, metrics),
                state,
                metrics,
            )
        return state, metrics

    return merge


def _with_item(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    return (*items[:number], item, *items[number + 1 :])
