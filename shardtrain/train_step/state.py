"""The train state: what a step reads and writes, what a checkpoint holds, what waits in host memory.

Next: `placement.py` (its shardings, and its creation on the mesh), `drift.py` (which changes what differs
between replicas), `step.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from shardtrain import axes
from shardtrain.combine.fragments import Fragment, make_fragments
from shardtrain.combine.replicas import find_stacked_paths, shard_shapes, split_layers
from shardtrain.combine.synchronisation import Synchronisation
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


@lru_cache(maxsize=8)
def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, stages: Partition | None = None
) -> State:
    """Return the shapes and dtypes of a state, without the arrays that differ between replicas."""
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
    stacked = find_stacked_paths(specs.arrays, specs.sharded)
    fragments = split_fragments(synchronisation, specs)
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


FIRST, LARGEST, SMALLEST = 2.0**15, 2.0**24, 2.0**-24
GOOD_STEPS = 2000
"""Number of finite steps in a row after which the scale is doubled."""


class LossScale(NamedTuple):
    """The scale of the loss of an island that computes in float16, whose gradients overflow and vanish early.

    The loss is multiplied by it before the backward pass, and the gradients are divided by it. Each island
    has its own: it is halved when its gradients are not finite, and doubled after many finite steps
    (Micikevicius et al., "Mixed Precision Training", 2018). It is a power of two, which rounds nothing. It
    may be below 1, as gradients are sums over tokens.

    Args:
      scale: float32 scalar.
      good_steps: int32 scalar, steps since the scale changed.
    """

    scale: Any
    good_steps: Any


def init_loss_scale() -> LossScale:
    """Return the scale before the first step."""
    return LossScale(jnp.float32(FIRST), jnp.int32(0))


def adjust_loss_scale(loss_scale: Any, finite: jax.Array) -> Any:
    """Return the scale after a step.

    Args:
      loss_scale: a `LossScale`; () if the loss is not scaled, and then () is returned.
      finite: whether this island's own gradients are finite.

    >>> adjust_loss_scale(LossScale(jnp.float32(8), jnp.int32(3)), jnp.bool(False))
    LossScale(scale=Array(4., dtype=float32), good_steps=Array(0, dtype=int32))
    """
    if not loss_scale:
        return loss_scale
    scale, good_steps = loss_scale
    good_steps = jnp.where(finite, good_steps + 1, 0)
    grows = good_steps >= GOOD_STEPS
    factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
    return LossScale(jnp.clip(scale * factor, SMALLEST, LARGEST), jnp.where(grows, 0, good_steps))


def is_overflow(loss_scale: LossScale, loss_sum: jax.Array, finite: jax.Array) -> jax.Array:
    """Return whether gradients may have overflowed because of the scale, so that a smaller one helps."""
    return jnp.isfinite(loss_sum) & ~finite & (loss_scale.scale > SMALLEST)


def get_scale(loss_scale: Any) -> Any:
    """Return the factor of the loss; 1 if it is not scaled."""
    return loss_scale.scale if loss_scale else 1


HOST = "pinned_host"
"""The kind of host memory that devices read and write directly."""


def shard_on_host(opt_state: Any, shardings: Any, mesh: Mesh) -> Any:
    """Return the shardings of an optimizer's state in host memory.

    Args:
      opt_state: the shapes of the state.
      shardings: its shardings in device memory.
      mesh: the mesh, whose devices must support such memory.

    Raises:
      ValueError: the devices do not support it.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        found = f"has {', '.join(kinds)}" if kinds else "is described and not here, so has none"
        raise ValueError(
            f"offload is 'optimizer', which needs a memory {HOST} of the host, and {device.device_kind}"
            f" {found}; use --offload none"
        )

    def placed(leaf: Any, sharding: NamedSharding) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if leaf.ndim else sharding

    return jax.tree.map(placed, opt_state, shardings)


def copy_to_device(opt_state: Any, shardings: Any) -> Any:
    """Copy an optimizer's state to device memory, inside jit.

    Args:
      opt_state: the state.
      shardings: the shardings of the state between steps.
    """
    if not is_offloaded(shardings):
        return opt_state
    return jax.device_put(opt_state, jax.tree.map(lambda s: s.with_memory_kind("device"), shardings))


def copy_out_of_host(arrays: Any) -> Any:
    """Copy the arrays of a pytree that are in host memory to device memory, outside jit."""
    return jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")) if is_offloaded(x.sharding) else x,
        arrays,
    )


def is_offloaded(shardings: Any) -> bool:
    """Return whether any of these shardings is in host memory."""
    return any(each.memory_kind == HOST for each in jax.tree.leaves(shardings))


def offload_optimizer(function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Wrap a function (state, ...) -> (state, metrics) to copy the optimizer's state from the host and back.

    Args:
      function: computes with all arrays in device memory.
      shardings: the `State` of shardings between calls.
    """
    if not is_offloaded(shardings.opt_state):
        return function

    def call(state: Any, *rest: Any) -> Any:
        state = state._replace(opt_state=copy_to_device(state.opt_state, shardings.opt_state))
        state, metrics = function(state, *rest)
        return state._replace(opt_state=jax.device_put(state.opt_state, shardings.opt_state)), metrics

    return call
