"""Train step in which each replica of a mesh runs its own optimizer; some steps merge the replicas' deltas.

In the first, synchronous steps all replicas use the mean gradient instead, so that they change alike. Next:
`drift.py`, the arithmetic; `step.py`, which compiles it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain import axes
from shardtrain.combine.combiner import mask_without_examples
from shardtrain.combine.replicas import combine_replicas, find_stacked_paths, list_combined_entries
from shardtrain.functional.loss import Batch
from shardtrain.sharding.specs import add_leading_dim
from shardtrain.train_step.drift import (
    RoundMerge,
    make_local_update,
    make_own_params,
    make_round_merges,
    merge_rounds,
    replace_item,
)
from shardtrain.train_step.gradients import ReplicaMeans, expand_dims_like
from shardtrain.train_step.placement import Placement, constrain
from shardtrain.train_step.state import Metrics, State, init_local


def make_delta_update(
    replica_means: ReplicaMeans, optimizer: optax.GradientTransformation, placement: Placement
) -> Callable[[State, Batch], tuple[Callable[[State], State], Metrics]]:
    """Make the computation of a step in which each replica runs its own optimizer: (update, metrics).

    If replicas synchronise in every step, it also combines their deltas: with Adasum this is Horovod's
    `_DistributedAdasumOptimizer`. Otherwise `make_merge` combines them.
    """
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
    """Make the function that combines the changes that are due at the end of a step.

    It takes the state after the step, and returns (the state after combining, the combiner's metrics), which
    are NaN if nothing was combined.

    Args:
      placement: the placement of the state.
      last_step: the last step of the run, see `step.make_step`.
    """
    synchronisation, rounds = placement.synchronisation, _MeshRounds(placement, last_step)

    def merge(state: State) -> tuple[State, Metrics]:
        if not synchronisation.keeps_drift:
            return rounds.combine(0, (state, {}))
        if synchronisation.synchronous_steps:
            is_synchronous = synchronisation.is_synchronous(state.step)
            state = jax.lax.cond(
                is_synchronous, partial(_add_common_drift, placement), lambda state: state, state
            )
        metrics: Metrics = {}
        for number in range(len(synchronisation.rounds)):
            metrics |= jax.eval_shape(partial(rounds.combine, number), (state, {}))[1]
        metrics = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), metrics)
        return merge_rounds(synchronisation, rounds, state.step, last_step, (state, metrics))

    return merge


Found = tuple[State, Metrics]
"""The state, and the metrics of the combiner."""


class _MeshRounds:
    """The rounds of a merge of a mesh's replicas, inside jit; a `drift.Rounds`."""

    def __init__(self, placement: Placement, last_step: int) -> None:
        specs, self._synchronisation = placement.specs, placement.synchronisation
        self._placement, self._last_step = placement, last_step
        self._rounds = make_round_merges(self._synchronisation, specs, lead=1)
        # metrics (L,) have an entry for each parameter; those of several rounds are not returned
        self._whole = len(self._rounds) == 1
        self._entries = list_combined_entries(specs)[1] if self._whole else None

    def do_if(
        self, is_now: Any, condition: Callable[[Found], Any], change: Callable[[Found], Found], s: Found
    ) -> Found:
        return jax.lax.cond(is_now & condition(s), change, lambda s: s, s)

    def is_under_way(self, number: int, s: Found) -> jax.Array:
        return s[0].local.sent_count.max(0)[number] >= 0

    def is_asked(self, number: int, s: Found) -> Any:
        trigger, (state, _) = self._synchronisation.trigger, s
        if trigger is None:
            return True
        fragment = self._rounds[number].fragment
        params, deltas = fragment.take(state.params), fragment.take(state.local.drift, lead=1)
        values = jax.vmap(trigger.measure, in_axes=(0, None))(deltas, params)
        return trigger.is_due(values) | (state.step == self._last_step)

    def send(self, number: int, s: Found) -> Found:
        state, metrics = s
        return state._replace(local=self._rounds[number].send(state.local)), metrics

    def combine(self, number: int, s: Found) -> Found:
        (state, metrics), own = s, self._rounds[number]
        deltas, counts = own.select(state.local)
        combined, combine_state, extra = combine_round(
            own, deltas, counts, state.combine_state[number], self._placement, self._entries
        )
        params, local, outer_state = own.merge(state.params, state.local, state.outer_state, combined)
        combine_state = replace_item(state.combine_state, number, combine_state)
        state = state._replace(
            params=params, local=local, combine_state=combine_state, outer_state=outer_state
        )
        return state, {**metrics, **{name: x for name, x in extra.items() if self._whole or not x.ndim}}


def combine_round(
    own: RoundMerge, values: Any, counts: jax.Array, combine_state: Any, placement: Placement, entries: Any
) -> tuple[Any, Any, Metrics]:
    """Combine what the replicas of a mesh have of a round, see `combine.replicas.combine_replicas`."""
    specs = placement.specs
    return combine_replicas(
        own.combiner,
        values,
        counts,
        combine_state,
        specs=own.fragment.select(specs.sharded),
        stacked=find_stacked_paths(specs.arrays, specs.sharded) & own.fragment.rows.keys(),
        mesh=placement.mesh,
        entries=entries,
    )


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
