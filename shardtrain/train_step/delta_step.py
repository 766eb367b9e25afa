"""The step of a mesh in which each replica runs its own optimizer, and some steps merge what they changed.

In the first, synchronous steps all replicas use the mean gradient instead, so that they change alike. Next:
`local_steps.py`, the arithmetic; `step.py`, which compiles it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain import axes
from shardtrain.combine.combiner import mask_without_examples
from shardtrain.combine.fragments import Fragment
from shardtrain.combine.replicas import combine_replicas, find_stacked_paths, list_combined_entries
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.sharding.specs import add_leading_dim
from shardtrain.train_step.gradients import expand_dims_like, make_replica_means
from shardtrain.train_step.local_steps import (
    make_local_update,
    make_own_params,
    merge_fragment,
    replace_item,
    select_combined,
    send,
)
from shardtrain.train_step.placement import Placement, constrain
from shardtrain.train_step.replica_state import init_local, split_fragments
from shardtrain.train_step.state import Metrics, State


def make_delta_update(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    start_row: int,
) -> Callable[[State, Batch], tuple[Callable[[State], State], Metrics]]:
    """Make the computation of a step in which each replica runs its own optimizer: (update, metrics).

    If replicas synchronise in every step, it also combines their deltas: with Adasum this is Horovod's
    `_DistributedAdasumOptimizer`. Otherwise `make_merge` combines them.
    """
    replica_means = make_replica_means(model, loss, placement, start_row)
    specs, mesh, synchronisation = placement.specs, placement.mesh, placement.synchronisation
    own_specs = add_leading_dim(specs.sharded, axes.DATA)
    # one optimizer per replica, over the leading dim of replicas
    own_update = jax.vmap(
        make_local_update(optimizer), in_axes=(None, 0, 0, 0, 0, 0), spmd_axis_name=axes.DATA
    )
    num_replicas = mesh.shape[axes.DATA]
    merge = make_merge(placement, -1)

    def compute(state: State, batch: Batch) -> tuple[Callable[[State], State], Metrics]:
        found, means, counts, values = replica_means(state, batch)
        if synchronisation.synchronous_steps:
            means, counts, values = jax.lax.cond(
                synchronisation.is_synchronous(state.step + 1),
                _average,
                lambda *own: own,
                *(means, counts, values),
            )
            means = constrain(means, own_specs, mesh)
        params = constrain(state.params, specs.sharded, mesh)
        local = state.local
        if not synchronisation.keeps_drift:
            local = init_local(params, synchronisation, lead=(num_replicas,))
        drift = constrain(local.drift, own_specs, mesh)
        opt_state, drift = own_update(params, drift, state.opt_state, means, counts, values)
        local = local._replace(drift=constrain(drift, own_specs, mesh), count=local.count + counts[:, None])
        state = state._replace(params=params, model_state=found.model_state, opt_state=opt_state, local=local)
        extra: Metrics = {}
        if not synchronisation.keeps_drift:
            state, extra = merge(state)
            state = state._replace(local=())
        # there is no common gradient: log the mean over the replicas' own
        squares = sum((m.astype(jnp.float32) ** 2).sum() for m in jax.tree.leaves(means)) / num_replicas
        # the metrics of merging are logged, so they cannot be part of an update that may be skipped
        return lambda _: state, {**found.logged, "grad_norm": jnp.sqrt(squares), **extra}

    return compute


def make_merge(placement: Placement, last_step: int) -> Callable[[State], tuple[State, Metrics]]:
    """Make the function that combines the changes of the fragments that are due at the end of a step.

    It takes the state after the step, and returns (the state after combining, the combiner's metrics), which
    are NaN if nothing was combined.

    Args:
      placement: the placement of the state.
      last_step: the last step of the run, see `step.make_step`.
    """
    specs, synchronisation = placement.specs, placement.synchronisation
    fragments, trigger = split_fragments(synchronisation, specs), synchronisation.trigger
    combine_fragment = _make_fragment_merge(placement, fragments)

    def merge_if(due: jax.Array, number: int, state: State, metrics: Metrics) -> tuple[State, Metrics]:
        return jax.lax.cond(
            due,
            lambda state, _: combine_fragment(number, state),
            lambda state, metrics: (state, metrics),
            state,
            metrics,
        )

    def is_sent(number: int, state: State) -> jax.Array:
        may = synchronisation.is_sent(number, state.step, last_step)
        if trigger is None:
            return may
        params = fragments[number].take(state.params)
        deltas = fragments[number].take(state.local.drift, lead=1)
        values = jax.vmap(trigger.measure, in_axes=(0, None))(deltas, params)
        return may & (trigger.is_due(values) | (state.step == last_step))

    def merge(state: State) -> tuple[State, Metrics]:
        if not synchronisation.keeps_drift:
            return combine_fragment(0, state)
        if synchronisation.synchronous_steps:
            is_synchronous = synchronisation.is_synchronous(state.step)
            state = jax.lax.cond(
                is_synchronous, partial(_add_common_drift, placement), lambda state: state, state
            )
        metrics = jax.tree.map(
            lambda x: jnp.full(x.shape, jnp.nan, x.dtype),
            jax.eval_shape(partial(combine_fragment, 0), state)[1],
        )
        for number in range(len(fragments)):
            if not synchronisation.overlap:
                state, metrics = merge_if(is_sent(number, state), number, state, metrics)
                continue
            # first what is under way arrives, then what was changed since is sent
            under_way = state.local.sent_count.max(0)[number] >= 0
            due = synchronisation.is_due(number, state.step, last_step)
            state, metrics = merge_if(due & under_way, number, state, metrics)
            local = jax.lax.cond(
                is_sent(number, state),
                partial(send, fragments[number], number, lead=1),
                lambda local: local,
                state.local,
            )
            state = state._replace(local=local)
            # nothing stays under way after the last step
            if last_step >= 0:
                state, metrics = merge_if(state.step == last_step, number, state, metrics)
        return state, metrics

    return merge


def _make_fragment_merge(
    placement: Placement, fragments: Sequence[Fragment]
) -> Callable[[int, State], tuple[State, Metrics]]:
    """Make the function that combines the replicas' changes of one fragment, given its number."""
    specs, synchronisation = placement.specs, placement.synchronisation
    stacked = find_stacked_paths(specs.arrays, specs.sharded)
    # metrics (L,) of several fragments are not returned
    entries = list_combined_entries(specs)[1] if len(fragments) == 1 else None
    outer = synchronisation.outer_optimizer

    def combine_fragment(number: int, state: State) -> tuple[State, Metrics]:
        fragment = fragments[number]
        deltas, counts = select_combined(fragment, number, state.local, lead=1)
        combined, combine_state, extra = combine_replicas(
            synchronisation.combiner,
            deltas,
            counts,
            state.combine_state[number],
            specs=fragment.select(specs.sharded),
            stacked=stacked & fragment.rows.keys(),
            mesh=placement.mesh,
            entries=entries,
        )
        params, local, outer_state = merge_fragment(
            fragment, number, outer, state.params, state.local, state.outer_state, combined, lead=1
        )
        combine_state = replace_item(state.combine_state, number, combine_state)
        state = state._replace(
            params=params, local=local, combine_state=combine_state, outer_state=outer_state
        )
        # metrics (L,) have an entry for each parameter
        whole = len(fragments) == 1
        return state, {name: x for name, x in extra.items() if whole or not x.ndim}

    return combine_fragment


def _add_common_drift(placement: Placement, state: State) -> State:
    """Add the drift, which all replicas share after a synchronous step, to the common parameters."""
    drift = jax.tree.map(lambda x: x[0], state.local.drift)
    params = constrain(make_own_params(state.params, drift), placement.specs.sharded, placement.mesh)
    rest, count = jax.tree.map(jnp.zeros_like, (state.local.drift, state.local.count))
    return state._replace(params=params, local=state.local._replace(drift=rest, count=count))


def _average(means: Any, counts: jax.Array, values: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Replace each replica's mean gradient, count and mean loss by those of all examples.

    Args:
      means: mean gradients (R, ...).
      counts: numbers of examples (R,).
      values: mean losses (R,).
    """
    total = counts.sum()
    shares = jnp.where(total > 0, counts / jnp.where(total > 0, total, 1), 0)

    def averaged(x: jax.Array) -> jax.Array:
        own = mask_without_examples(x, expand_dims_like(counts, x))
        return jnp.broadcast_to(jnp.tensordot(shares, own, 1), x.shape)

    return jax.tree.map(averaged, means), jnp.full_like(counts, total), averaged(values)
