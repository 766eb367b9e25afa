"""Convert a linen module to the pure functions of a `Model`. Next: `model.py`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardtrain.functional.batch_norm import REPLICAS, bind_axis, find_axis_name
from shardtrain.functional.model import Model, Tree, dim_names, keep_structure, path_text
from shardtrain.functional.model_calls import split_options
from shardtrain.functional.rng import new_key
from shardtrain.functional.run_trace import give_ops
from shardtrain.functional.training_mode import Call, check_evaluation, mode_arguments, record_calls


def from_linen(
    module: nn.Module,
    *inputs: Any,
    rng_streams: tuple[str, ...] = ("dropout",),
    evaluation: nn.Module | None = None,
    without: tuple[str, ...] = (),
    sync_batch_norm: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Model:
    """Convert a linen module to a `Model`.

    Args:
      module: dims come from `nn.with_partitioning` and `nn.with_logical_partitioning`. Arguments of
        `__call__` that set the mode are passed (see `training_mode.mode_arguments`).
      *inputs: arrays or jax.ShapeDtypeStruct of one batch, of any batch size; random keys and values that
        are no arrays are passed unchanged.
      rng_streams: names of the module's rng streams; streams of other names share one key.
      evaluation: the same module constructed for evaluation, if its mode is a field and not an argument of
        its call: TransformerLM(config.replace(deterministic=True)).
      without: variable collections that are dropped after each call, such as sown values.
      sync_batch_norm: whether every nn.BatchNorm averages the statistics of a microbatch over all replicas,
        like one with an axis_name; otherwise each replica has its own.
      options: keyword arguments of `__call__`, given like the inputs.

    Raises:
      ValueError: the module would apply dropout or use batch statistics in evaluation too.
    """
    evaluated = module if evaluation is None else evaluation

    def variables(key: jax.Array) -> dict[str, Tree]:
        zeros, given = jax.tree.map(_make_zeros, (inputs, dict(options)))
        modes: dict[str, Any] = mode_arguments(type(evaluated).__call__, False)
        found: Any = evaluated.init({"params": key}, *zeros, **{**modes, **given})
        return {name: tree for name, tree in found.items() if name not in without}

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        model_state = nn.unbox(variables(key))
        return model_state.pop("params", {}), model_state

    def apply(params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any) -> tuple[Any, Tree]:
        used = give_ops(module if train else evaluated)
        inputs, given = split_options(inputs)
        modes: dict[str, Any] = mode_arguments(type(used).__call__, train)
        # only training changes the model state, such as running statistics
        mutable = list(model_state) if train else []
        with _synchronise_norms(axis_name if sync_batch_norm else None):
            outputs, changed = used.apply(
                {"params": params, **model_state},
                *inputs,
                **{**modes, **given},
                rngs=_make_rngs(rng, rng_streams),
                mutable=mutable,
            )
        return outputs, keep_structure({**model_state, **changed}, model_state)

    # trace the module once, to find its dims and the layers that need an axis of replicas
    boxed, calls, axis_name = _trace(variables)
    if sync_batch_norm and any(isinstance(call.module, nn.BatchNorm) for call in calls):
        axis_name = axis_name or REPLICAS
    if evaluation is None:
        check_evaluation(type(module).__name__, calls)
    return Model(init=init, apply=bind_axis(apply, axis_name), dims=_dims(boxed), axis_name=axis_name)


def _trace(variables: Callable[[jax.Array], dict[str, Tree]]) -> tuple[Tree, list[Call], str | None]:
    """Trace the initialisation; return the boxed parameters, all module calls, and the axis name of norms."""
    calls: list[Call] = []
    try:
        with record_calls(calls):
            boxed = jax.eval_shape(variables, new_key(0)).get("params", {})
    finally:
        # raise about axis names first: a norm that cannot be synchronised fails with an unbound axis name
        axis_name = find_axis_name(call.module for call in calls)
    return boxed, calls, axis_name


def _make_zeros(like: Any) -> Any:
    """Return zeros of a shape and dtype, or a key for the dtype of keys; values without a shape unchanged."""
    if not hasattr(like, "shape"):
        return like
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.split(new_key(0), like.shape) if like.shape else new_key(0)
    return jnp.zeros(like.shape, jax.dtypes.canonicalize_dtype(like.dtype))


def _make_rngs(rng: jax.Array, streams: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return a key for each rng stream; linen derives other streams from the key of `params`."""
    names = dict.fromkeys((*streams, "params"))
    return {name: jax.random.fold_in(rng, i) for i, name in enumerate(names)}


def _dims(boxed: Tree) -> Tree:
    """Return the dim names of parameters; None for those that are not boxed in nn.Partitioned."""

    def is_boxed(leaf: Any) -> bool:
        return isinstance(leaf, nn.Partitioned)

    def find_dims(path: Any, leaf: Any) -> Any:
        return dim_names(leaf.names, leaf.value.shape, path_text(path)) if is_boxed(leaf) else None

    return jax.tree.map_with_path(find_dims, boxed, is_leaf=is_boxed)


@contextmanager
def _synchronise_norms(axis_name: str | None) -> Iterator[None]:
    """Within this context, give every nn.BatchNorm without an axis name this one; None changes nothing."""

    def intercept(call: Any, arguments: Any, options: Any, context: Any) -> Any:
        module = context.module
        if axis_name and isinstance(module, nn.BatchNorm) and module.axis_name is None:
            # the module is a bound copy that exists for this call only
            object.__setattr__(module, "axis_name", axis_name)
        return call(*arguments, **options)

    with nn.intercept_methods(intercept):
        yield
