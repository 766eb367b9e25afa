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
    """Everything that a step changes, and that a checkpoint holds.

    Args:
      step: int32 scalar, steps done; with `seed` it determines all randomness of the next step.
      seed: uint32 scalar.
      params: nested dict of arrays.
      model_state: nested dict of what changes without being trained (running statistics).
      opt_state: the optimizer's state; where each replica has its own, (data, ...).
      combine_state: the combiner's, such as the residuals of a compression, fragment by fragment: in a mesh
        (devices, ...), as each device keeps that of its own shards; () if it has none.
      local: what replicas changed since they were last combined, a `Local`; () if they are combined in
        every step.
      outer_state: the outer optimizer's state, fragment by fragment; () without one.
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
    """What each replica changed in its local steps since replicas were last combined.

    In a mesh every array has a first dim (data,); an island or a stage holds its own alone.

    Args:
      drift: like params, float32: a replica's parameters minus the common ones.
      count: float32 (..., fragments), examples or tokens since each fragment was sent.
      sums: of islands: sums of the loss and the like since the last merge, which are reported then.
      sent: like drift, where merges overlap with steps: the part of it that was sent and has not been
        combined yet, else zeros; () without overlap.
      sent_count: like count, of what was sent; -1 where nothing is under way.
      model_state: of islands: the model's state of this one; the common one is that of the last merge.
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
    """Return the shapes and dtypes of a state, without what each replica has of its own; computes nothing."""
    # the order of blocks changes no shape, unless stages have unequal numbers of them
    return _abstract_state(model, optimizer, None if stages is None or stages.is_plain else stages)


@lru_cache(maxsize=8)
def _abstract_state(model: Model, optimizer: optax.GradientTransformation, stages: Partition | None) -> State:
    return jax.eval_shape(lambda: new_state(model, optimizer, jnp.uint32(0), order_stage_blocks(stages)))


def order_stage_blocks(
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
        return whole(path, stages.store_blocks(whole(path, x)))

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
      store: model parameters -> parameters as they are stored, see `order_stage_blocks`.
    """
    params, model_state = model.init(new_key(seed))
    params = store(params)
    state = State(jnp.int32(0), seed, params, model_state, make_storable(optimizer).init(params))
    # weak types do not survive a checkpoint, and results of another dtype would follow from that
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), state)
