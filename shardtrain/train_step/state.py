"""The train state: what a step reads and writes, and what a checkpoint holds.

Next: `placement.py` (its shardings), `initial_state.py` (its creation on the mesh), `step.py`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardtrain import axes
from shardtrain.combine.options import Combine
from shardtrain.combine.replicas import shard_shapes, split_layers, stacked_paths
from shardtrain.functional.model import BLOCKS, Model, Tree, path_text
from shardtrain.optim.optimizer_state import stored
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.array_dims import Named


class State(NamedTuple):
    """Everything that a step changes, and that a checkpoint holds.

    Args:
      step: int32 scalar, steps done; with `seed` it determines all randomness of the next step.
      seed: uint32 scalar.
      params: nested dict of arrays.
      model_state: nested dict of what changes without being trained (running statistics).
      opt_state: the optimizer's state; where each replica has its own, (data, ...).
      combine_state: the combiner's, such as the residuals of a compression: (devices, ...), as each device
        keeps that of its own shards; () if it has none.
      local: what replicas changed since they were last combined, a `Local`; () if they are combined in
        every step.
    """

    step: Any
    seed: Any
    params: Any
    model_state: Any
    opt_state: Any
    combine_state: Any = ()
    local: Any = ()


class Local(NamedTuple):
    """What each replica changed in its local steps since replicas were last combined.

    Args:
      drift: like params, each leaf (data, ...): a replica's parameters minus the common ones.
      count: float32 (data,), examples or tokens since then.
    """

    drift: Any
    count: Any


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, stages: Partition | None = None
) -> State:
    """Return the shapes and dtypes of a state, without what each replica has of its own; computes nothing."""
    return jax.eval_shape(lambda: new_state(model, optimizer, jnp.uint32(0), in_stage_order(stages)))


def in_stage_order(
    stages: Partition | None, whole: Callable[[Any, Any], Any] = lambda path, x: x
) -> Callable[[Tree], Tree]:
    """Return a function that puts the blocks of parameters in the order of a pipeline's stages.

    Args:
      stages: None for no pipeline.
      whole: (path, array) -> the array, sharded so that every device can reorder all blocks.
    """
    if stages is None or stages.is_plain:
        return lambda params: params

    def stored(path: Any, x: jax.Array) -> jax.Array:
        if not path_text(path).startswith(f"{BLOCKS}/"):
            return x
        return whole(path, stages.stored(whole(path, x)))

    return lambda params: jax.tree.map_with_path(stored, params)


def new_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: jax.Array,
    store: Callable[[Tree], Tree] = lambda params: params,
) -> State:
    """Return the initial state, without what each replica has of its own; for use inside jit.

    Args:
      model: the model.
      optimizer: the optimizer.
      seed: uint32 scalar.
      store: model parameters -> parameters as they are stored, see `in_stage_order`.
    """
    params, model_state = model.init(jax.random.key(seed))
    params = store(params)
    state = State(jnp.int32(0), seed, params, model_state, stored(optimizer).init(params))
    # weak types do not survive a checkpoint, and results of another dtype would follow from that
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), state)


def with_replicas(
    state: State, combine: Combine, sizes: Mapping[str, int], arrays: Mapping[str, Named], sharded: Any
) -> State:
    """Return the state with the arrays that each replica has of its own, if the combiner needs any."""
    if combine.is_mean:
        return state
    num_replicas = sizes[axes.DATA]

    def replicated(tree: Any, copies: int) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (copies, *jnp.shape(x))), tree)

    # the combiner works layer by layer, on each device's shard
    layers = split_layers(shard_shapes(state.params, sharded, sizes), stacked_paths(arrays, sharded))
    state = state._replace(combine_state=replicated(combine.combiner.init(layers), math.prod(sizes.values())))
    if combine.on_deltas:
        state = state._replace(opt_state=replicated(state.opt_state, num_replicas))
    if combine.local_steps > 1:
        drift = jax.tree.map(lambda x: jnp.zeros((num_replicas, *x.shape), x.dtype), state.params)
        state = state._replace(local=Local(drift, jnp.zeros(num_replicas)))
    return state
