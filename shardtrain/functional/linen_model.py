"""The pure functions of a linen module. Next: `model.py`, what they are and the same for nnx."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardtrain.errors.messages import problems_error
from shardtrain.functional.batch_norm import REPLICAS, one_axis_name, with_axis_bound
from shardtrain.functional.model import Model, Tree, dim_names, path_text, same_structure
from shardtrain.functional.training_mode import MODES, mode_arguments


def from_linen(
    module: nn.Module,
    *inputs: Any,
    rng_streams: tuple[str, ...] = ("dropout",),
    evaluation: nn.Module | None = None,
    without: tuple[str, ...] = (),
    sync_batch_norm: bool = False,
) -> Model:
    """The pure functions of a linen module.

    Args:
      module: dims come from `nn.with_partitioning`, `nn.with_logical_partitioning`. Arguments of `__call__`
        by the names in `model.mode_arguments` are given.
      *inputs: arrays or jax.ShapeDtypeStruct of one batch, any batch size.
      rng_streams: the rng streams that the module draws from; others draw from one in common.
      evaluation: the same module as it is built for evaluation, where its mode is fixed when it is built and
        not an argument of its call: TransformerLM(config.replace(deterministic=True)).
      without: collections of variables that are not kept between calls, such as what a module sows.
      sync_batch_norm: every nn.BatchNorm takes the statistics of a microbatch over all replicas, as one with
        an axis_name does; else each replica has its own.

    Raises:
      ValueError: the module would drop out, or use statistics of the batch, in evaluation too.
    """
    seen: list[_Seen] = []
    other = module if evaluation is None else evaluation

    def rngs(rng: jax.Array) -> dict[str, jax.Array]:
        names = dict.fromkeys((*rng_streams, "params"))
        return {name: jax.random.fold_in(rng, i) for i, name in enumerate(names)}

    def variables(key: jax.Array) -> dict[str, Tree]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        options: dict[str, Any] = mode_arguments(type(other).__call__, False)
        found: Any = other.init({"params": key}, *zeros, **options)
        return {name: tree for name, tree in found.items() if name not in without}

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        model_state = nn.unbox(variables(key))
        return model_state.pop("params", {}), model_state

    def apply(params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any) -> tuple[Any, Tree]:
        used = module if train else other
        options: dict[str, Any] = mode_arguments(type(used).__call__, train)
        mutable = list(model_state) if train else []
        with _synchronised(axis_name if sync_batch_norm else None):
            outputs, changed = used.apply(
                {"params": params, **model_state}, *inputs, **options, rngs=rngs(rng), mutable=mutable
            )
        return outputs, same_structure({**model_state, **changed}, model_state)

    def is_boxed(leaf: Any) -> bool:
        return isinstance(leaf, nn.Partitioned)

    def dims_of(path: Any, leaf: Any) -> Any:
        return dim_names(leaf.names, leaf.value.shape, path_text(path)) if is_boxed(leaf) else None

    try:
        with _watched(seen.append):
            boxed = jax.eval_shape(variables, jax.random.key(0)).get("params", {})
    finally:
        # first of all, for norms that cannot be synchronised end with an unbound name
        axis_name = one_axis_name(one.module for one in seen)
    if sync_batch_norm and any(isinstance(one.module, nn.BatchNorm) for one in seen):
        axis_name = axis_name or REPLICAS
    if evaluation is None:
        _check_evaluation(type(module).__name__, seen)
    return Model(
        init=init,
        apply=with_axis_bound(apply, axis_name),
        dims=jax.tree.map_with_path(dims_of, boxed, is_leaf=is_boxed),
        axis_name=axis_name,
    )


@contextmanager
def _synchronised(axis_name: str | None) -> Iterator[None]:
    """Give every nn.BatchNorm that is called this axis of replicas, if it has none."""

    def intercept(call: Any, arguments: Any, options: Any, context: Any) -> Any:
        module = context.module
        if axis_name and isinstance(module, nn.BatchNorm) and module.axis_name is None:
            # a bound copy, made for this call
            object.__setattr__(module, "axis_name", axis_name)
        return call(*arguments, **options)

    with nn.intercept_methods(intercept):
        yield


@dataclass(frozen=True)
class _Seen:
    """A module that was called, and why it is not as it should be in evaluation."""

    module: nn.Module
    problem: str | None


MODE_FIELDS = {
    nn.Dropout: ("rate", "deterministic", "drops out"),
    nn.MultiHeadDotProductAttention: ("dropout_rate", "deterministic", "drops out"),
    nn.BatchNorm: (None, "use_running_average", "takes the statistics of the batch"),
}
"""Kind of module -> the field that makes its mode matter, that of its mode, and what it does if False."""


@contextmanager
def _watched(see: Callable[[_Seen], None]) -> Iterator[None]:
    """Show every linen module that is called."""

    def intercept(call: Any, arguments: Any, options: Any, context: Any) -> Any:
        if context.method_name == "__call__":
            see(_Seen(context.module, _mode_problem(context.module, arguments, options)))
        return call(*arguments, **options)

    with nn.intercept_methods(intercept):
        yield


def _mode_problem(module: nn.Module, arguments: Any, options: Any) -> str | None:
    """What this module does, in this call, that belongs to training."""
    for kind, (rate, field, what) in MODE_FIELDS.items():
        if isinstance(module, kind) and (rate is None or getattr(module, rate) > 0):
            bound = inspect.signature(type(module).__call__).bind(module, *arguments, **options).arguments
            mode = bound.get(field) if getattr(module, field) is None else getattr(module, field)
            if mode is False:
                return f"{'/'.join(module.path)} {what}: {field} is False"
    return None


def _check_evaluation(name: str, seen: list[_Seen]) -> None:
    problems = list(dict.fromkeys(one.problem for one in seen if one.problem is not None))
    if problems:
        modes = ", ".join(MODES)
        error = str(problems_error(f"{name} would behave in evaluation as in training", problems))
        raise ValueError(
            f"{error}\n  its mode is fixed when it is built; give it twice, as from_linen({name}(...), ...,"
            f" evaluation={name}(...)), the second built for evaluation, or let __call__ take one of {modes}"
        )
