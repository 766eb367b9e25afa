"""The train state: what a step reads and writes, and what a checkpoint holds.

Next: `placement.py` (its shardings), `initial_state.py` (its creation on the mesh), `step.py`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardtrain.functional.model import BLOCKS, Model, Tree, path_text
from shardtrain.functional.rng import new_key
from shardtrain.optim.optimizer_state import make_storable
from shardtrain.pipeline.stacking import Partition

Metrics = dict[str, Any]
"""Name -> float32 scalar, or (sum, count), or (L,) of a combiner."""


class State(NamedTuple):
    """The train state, which a step changes and a checkpoint holds.

    Args:
      step: int32 scalar, steps done; with `seed` it determines all randomness of the next step.
      seed: uint32 scalar.
      params: nested dict of arrays.
      model_state: nested dict of arrays that change without being trained (running statistics).
      opt_state: the optimizer's state; (data, ...) if each replica has its own.
      combine_state: the combiner's state of each fragment, such as residuals of a compression; in a mesh
        (devices, ...), as each device has the state of its own shards; () if the combiner has none.
      local: a `Local` with the changes of replicas since the last merge; () if they are combined in every
        step.
      outer_state: the outer optimizer's state of each fragment; () without an outer optimizer.
      loss_scale: this island's `LossScale`; () if no island computes in float16.
    """

    step: Any
    seed: Any
    params: Any
    model_state: Any
    opt_state: Any
    combine_state: Any = ()
    local: Any = ()
    outer_state: Any = ()
    loss_scale: Any = ()


class Local(NamedTuple):
    """The changes of each replica in its local steps since the last merge.

    In a mesh every array has a first dim (data,); an island or a stage holds only its own changes.

    Args:
      drift: like params, float32: a replica's parameters minus the common ones.
      count: float32 (..., fragments), examples or tokens since each fragment was sent.
      sums: on islands, sums of the loss and other metrics since the last merge, which reports them.
      sent: like drift, if merges overlap with steps: the drift that was sent and has not been combined yet,
        otherwise zeros; () without overlap.
      sent_count: like count, for what was sent; -1 if nothing is being sent.
      model_state: on islands, the model state of this island; `State.model_state` is that of the last merge.
    """

    drift: Any
    count: Any
    sums: Any = ()
    sent: Any = ()
    sent_count: Any = ()
    model_state: Any = ()


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, stages: Partition | None = None
) -> State:
    """Return the shapes and dtypes of a state, without the arrays that differ between replicas."""
    # the order of blocks changes no shape, unless stages have unequal numbers of them
    return _abstract_state(model, optimizer, None if stages is None or stages.is_plain else stages)


@lru_cache(maxsize=8)
def _abstract_state(model: Model, optimizer: optax.GradientTransformation, stages: Partition | None) -> State:
    return jax.eval_shape(lambda: new_state(model, optimizer, jnp.uint32(0), order_stage_blocks(stages)))


def order_stage_blocks(
    stages: Partition | None, whole: Callable[[Any, Any], Any] = lambda path, x: x
) -> Callable[[Tree], Tree]:
    """Return a function that reorders the blocks of parameters by the stages of a pipeline.

    Args:
      stages: the partition; None without a pipeline.
      whole: (path, array) -> the array, sharded so that every device can reorder all blocks.
    """
    if stages is None or stages.is_plain:
        return lambda params: params

    def stored(path: Any, x: jax.Array) -> jax.Array:
        if not path_text(path).startswith(f"{BLOCKS}/"):
            return x
        return whole(path, stages.store_blocks(whole(path, x)))

    return lambda params: jax.tree.map_with_path(stored, params)


def new_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: jax.Array,
    store: Callable[[Tree], Tree] = lambda params: params,
) -> State:
    """Create the initial state without the arrays that differ between replicas, inside jit.

    Args:
      model: the model.
      optimizer: the optimizer.
      seed: uint32 scalar.
      store: model parameters -> stored parameters, see `order_stage_blocks`.
    """
    params, model_state = model.init(new_key(seed))
    params = store(params)
    state = State(jnp.int32(0), seed, params, model_state, make_storable(optimizer).init(params))
    # weak types do not survive a checkpoint, and would then change dtypes of results
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), state)
