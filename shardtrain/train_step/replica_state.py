"""Create the part of a state that differs between replicas.

Next: `local_steps.py`, which changes it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain import axes
from shardtrain.combine.fragments import Fragment, make_fragments
from shardtrain.combine.replicas import find_stacked_paths, shard_shapes, split_layers
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.train_step.state import Local, State


def add_replicas(
    state: State,
    synchronisation: Synchronisation,
    sizes: Mapping[str, int],
    specs: Any,
) -> State:
    """Add to a state the arrays that differ between the replicas of a mesh.

    Args:
      state: arrays or, inside `jax.eval_shape`, shapes.
      synchronisation: how the replicas are synchronised; ordinary data parallelism needs no such arrays.
      sizes: axis -> size.
      specs: `placement.Specs` of the state without these arrays.
    """
    if synchronisation.is_mean:
        return state
    num_replicas = sizes[axes.DATA]

    def replicated(tree: Any, copies: int) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (copies, *jnp.shape(x))), tree)

    # the combiner works layer by layer, on each device's shard
    stacked, fragments = (
        find_stacked_paths(specs.arrays, specs.sharded),
        split_fragments(synchronisation, specs),
    )
    shards = (
        shard_shapes(each.take(specs.abstract.params), each.select(specs.sharded), sizes)
        for each in fragments
    )
    combine_state = tuple(
        each.combiner.init(split_layers(of_round, stacked))
        for each, of_round in zip(synchronisation.rounds, shards, strict=True)
    )
    state = state._replace(combine_state=replicated(combine_state, math.prod(sizes.values())))
    if synchronisation.on_deltas:
        state = state._replace(
            opt_state=replicated(state.opt_state, num_replicas),
            outer_state=init_outer(fragments, synchronisation.outer_optimizer, state.params),
        )
    if synchronisation.keeps_drift:
        state = state._replace(local=init_local(state.params, synchronisation, lead=(num_replicas,)))
    return state


def init_local(
    params: Any, synchronisation: Synchronisation, sums: Any = (), lead: tuple[int, ...] = ()
) -> Local:
    """Return the `Local` of a replica that has changed nothing.

    Args:
      params: the common parameters, arrays or shapes.
      synchronisation: how replicas are synchronised.
      sums: zeros for the sums until the next merge.
      lead: leading dims of each array, such as a dim of replicas.
    """
    drift = jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), jnp.float32), params)
    count = jnp.zeros((*lead, len(synchronisation.rounds)))
    if not synchronisation.overlap:
        return Local(drift, count, sums)
    return Local(drift, count, sums, jax.tree.map(jnp.zeros_like, drift), jnp.full_like(count, -1))


def restart_local(local: Local, model_state: Any) -> Local:
    """Return the `Local` of an island that has changed nothing yet.

    Args:
      local: a `Local` of the same shapes and shardings.
      model_state: the common model state.
    """
    zeros = jax.tree.map(jnp.zeros_like, local)
    return zeros._replace(
        sent_count=jax.tree.map(lambda x: jnp.full_like(x, -1), local.sent_count),
        model_state=jax.tree.map(jnp.copy, model_state),
    )


def make_local_layout(
    synchronisation: Synchronisation, like_params: Any, whole: Any, sums: Any = ()
) -> Local:
    """Return the specs or shardings of a `Local`.

    Args:
      synchronisation: how replicas are synchronised.
      like_params: specs or shardings of the drift.
      whole: spec or sharding of the counts.
      sums: specs or shardings of the sums.
    """
    if not synchronisation.overlap:
        return Local(like_params, whole, sums)
    return Local(like_params, whole, sums, like_params, whole)


def init_outer(fragments: Sequence[Fragment], outer: optax.GradientTransformation | None, params: Any) -> Any:
    """Create the outer optimizer's state of each round; () without an outer optimizer."""
    return () if outer is None else tuple(outer.init(each.take(params)) for each in fragments)


def split_fragments(synchronisation: Synchronisation, specs: Any) -> tuple[Fragment, ...]:
    """Return the part of a model's trained parameters that each round combines.

    Args:
      synchronisation: how replicas are synchronised.
      specs: `placement.Specs` of the model.
    """
    stacked = find_stacked_paths(specs.arrays, specs.sharded)
    num_stages = 1 if specs.stages is None else specs.stages.num_stages
    fragments = make_fragments(specs.trained, stacked, synchronisation.fragments, num_stages)
    return tuple(fragments[each.fragment] for each in synchronisation.rounds)
