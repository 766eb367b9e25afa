"""Convert an nnx module to the pure functions of a `Model`.

Next: `model.py`, and `activation_rules.py`, under which models are traced.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
from flax import nnx

from shardtrain.axes import LAYERS
from shardtrain.functional.auxiliary import AUXILIARY, Outputs
from shardtrain.functional.model import BLOCKS, Chain, Model, Tree, dim_names, name_parameters
from shardtrain.functional.model_calls import split_options
from shardtrain.functional.module_factory import STREAMS, construct, linen_text
from shardtrain.functional.split_module import nest, plain_values, split_module, split_variables
from shardtrain.functional.training_mode import mode_arguments
from shardtrain.sharding.array_dims import is_dims

Path = tuple[Any, ...]


class _ChainStreams:
    """Records which part of a chain draws from which random stream, while the chain is traced."""

    def __init__(self) -> None:
        self._part_of: dict[Path, str] = {}

    def watch(
        self, part: str, module: nnx.Module, call: Callable[[], Any], blocks: range | None = None
    ) -> Any:
        """Call a part of a chain and return its result.

        Args:
          part: its name in a message.
          module: the module of which it is a part.
          call: the part.
          blocks: the blocks of an nnx.List that it computes, whose streams it may use; None means all.

        Raises:
          ValueError: it draws from a stream from which another part, or another stage, draws.
        """
        before = _counts(module)
        result = call()
        for path, count in _counts(module).items():
            if count is before.get(path):
                continue
            if blocks is not None and path[0] == BLOCKS and path[1] in blocks:
                continue
            other = self._part_of.setdefault(path, part)
            if other != part or blocks is not None:
                raise ValueError(
                    "in a pipeline each stage counts the draws of a random stream from 0, and"
                    f" {'/'.join(map(str, path[:-1]))} is drawn from in {other} and in"
                    f" {f'{part} of other blocks' if other == part else part}: their masks would differ from"
                    " those of one device; give each its own stream in the constructor, as in"
                    " nnx.Dropout(0.1, rngs=rngs) or self.rngs = rngs.fork()"
                )
        return result


def _counts(module: nnx.Module) -> dict[Path, jax.Array]:
    """Return the number of draws so far of each stream of a module, by the path of its count."""
    counts = nnx.to_flat_state(nnx.state(module, nnx.RngCount))
    return {path: count.get_value() for path, count in counts}


def is_module(value: Any) -> bool:
    """Return whether this is an instance of a Flax module."""
    return isinstance(value, nn.Module | nnx.Module)


Factory = Callable[..., nnx.Module]
"""A class of modules or a function, called with `rngs` only, see `module_factory.py`."""


def convert_model(model: Any, names: Mapping[str, Sequence[str | None]] | None = None) -> Model:
    """Return a `Model` unchanged, or convert an nnx factory by `from_nnx`.

    Args:
      model: one of these.
      names: dim names given outside the model, see `name_parameters`.

    Raises:
      ValueError: anything else; for a linen or nnx module the message says what to write.
    """
    if isinstance(model, Model):
        return name_parameters(model, names or {})
    if isinstance(model, nn.Module):
        raise ValueError(linen_text(f"model is the linen module {type(model).__name__}"))
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ValueError(linen_text(f"model is the class {model.__name__} of linen modules"))
    if isinstance(model, nnx.Module):
        raise ValueError(
            f"model is an nnx module {type(model).__name__} that is already initialised on one device; give"
            f" its class, {type(model).__name__}, or the function that makes it: lambda rngs:"
            f" {type(model).__name__}(..., rngs=rngs)"
        )
    if callable(model):
        return name_parameters(from_nnx(cast("Factory", model)), names or {})
    raise ValueError(f"model is {model!r}; allowed: a Model, or a function rngs -> nnx.Module")


def from_nnx(factory: Factory, *, sync_batch_norm: bool = False) -> Model:
    """Convert an nnx module to a `Model`.

    Args:
      factory: makes the module from its Rngs; called only under jit, so that no parameter is ever stored
        unsharded on one device. Dims come from the parameters' `out_sharding` metadata.
      sync_batch_norm: whether every nnx.BatchNorm averages the statistics of a microbatch over all replicas,
        like one with an axis_name; otherwise each replica has its own.

    Returns:
      A `Model`. `deterministic` and `use_running_average` are False in training and True in evaluation, in
      every submodule that has them and in arguments of `__call__` (see `mode_arguments`). Rng streams get
      keys from the step's key, also as an argument `rngs`. Variables of type nnx.Intermediate are dropped.
      A module with `blocks` (an nnx.List, or one module of stacked parameters), `first(*inputs)`,
      `run(blocks, activations, keys)` and `last(activations)` has a chain. `keys` is the slice for these
      blocks of what `block_keys()` returns (arrays whose first dim is the blocks), or None.

    Raises:
      ValueError: batch statistics or dim names of the module cannot be used.
    """
    abstract, split = split_module(factory, sync_batch_norm)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        with nnx.use_eager_sharding(False):
            module = construct(factory, nnx.Rngs(key))
        _, params, _, model_state = split_variables(module)
        return plain_values(params), plain_values(model_state)

    def apply(params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any) -> tuple[Any, Tree]:
        inputs, given = split_options(inputs)
        options: dict[str, Any] = mode_arguments(type(abstract).__call__, train)
        if streams := _call_arguments(abstract).get(STREAMS):
            # a key that no stream of the module has
            key = jax.random.fold_in(rng, len(nnx.to_flat_state(split.rngs)))
            options[STREAMS] = key if _is_key(streams.annotation) else nnx.Rngs(key)
        call = split.pure(lambda module, *inputs: _call_asked(module, *inputs, **{**options, **given}))
        return call(params, model_state, rng, train, *inputs)

    dims = nest(
        (path, dim_names(v.get_metadata().get("out_sharding"), v.shape, "/".join(map(str, path))))
        for path, v in nnx.to_flat_state(split.params)
    )
    chain = _chain(abstract, dims, split.pure)
    return Model(init=init, apply=apply, dims=dims, chain=chain, axis_name=split.axis_name)


def _call_arguments(module: nnx.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's call, by name.

    Raises:
      ValueError: it has no call.
    """
    if not any("__call__" in vars(each) for each in type(module).__mro__):
        raise ValueError(f"model {type(module).__name__} has no __call__; a loss calls it, as apply(inputs)")
    return inspect.signature(type(module).__call__).parameters


def _is_key(annotation: Any) -> bool:
    """Return whether an argument takes a single random key, by its annotation.

    >>> _is_key(jax.Array), _is_key("jax.Array | None"), _is_key(nnx.Rngs | None), _is_key(int)
    (True, True, False, False)
    """
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "Rng" not in text and any(word in text for word in ("Array", "Key"))


def _call_asked(call: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call a module, or its method, with `Outputs` if it has losses of its own (`auxiliary.py`)."""
    if AUXILIARY not in inspect.signature(call).parameters:
        return call(*inputs, **options)
    outputs, auxiliary = call(*inputs, **options, **{AUXILIARY: True})
    return outputs if auxiliary is None else Outputs(outputs, auxiliary)


Pure = Callable[[Callable[..., Any]], Callable[..., tuple[Any, Tree]]]
"""See `SplitModule.pure`."""


def _chain(module: Any, dims: Tree, pure: Pure) -> Chain | None:
    """Return the chain of an nnx module; None unless it has all parts of a chain."""
    parts = ("first", "run", "last")
    if not hasattr(module, BLOCKS) or not all(callable(getattr(module, name, None)) for name in parts):
        return None
    stacked = not isinstance(module.blocks, nnx.List)
    names = jax.tree.leaves(dims.get(BLOCKS, {}), is_leaf=is_dims)
    # stacked blocks can be sliced by number only if every parameter counts blocks first
    if stacked and not (names and all(n and n[0] == LAYERS for n in names)):
        return None
    num_blocks = jax.tree.leaves(module.blocks)[0].shape[0] if stacked else len(module.blocks)
    streams = _ChainStreams()

    def keys(module: Any, start: Any, number: int) -> Any:
        # a stage uses the keys of its own blocks among those of all
        found = streams.watch("block_keys", module, getattr(module, "block_keys", lambda: None))
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, number), found)

    def run(module: Any, start: Any, number: int, activations: Any) -> Any:
        blocks = module.blocks if stacked else list(module.blocks)[start : start + number]
        call = partial(module.run, blocks, activations, keys(module, start, number))
        some = range(0) if stacked else range(start, start + number)
        return streams.watch("run", module, call, None if number == num_blocks else some)

    return Chain(
        num_blocks=num_blocks,
        stacked=stacked,
        first=pure(lambda module, *inputs: streams.watch("first", module, partial(module.first, *inputs))),
        run=pure(run),
        last=pure(lambda module, x: streams.watch("last", module, partial(_call_asked, module.last, x))),
    )
