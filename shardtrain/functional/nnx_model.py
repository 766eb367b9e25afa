"""The pure functions of an nnx module.

Next: `model.py` (what they are), `activation_rules.py` (under which they are traced).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.axes import LAYERS
from shardtrain.functional.batch_norm import REPLICAS, one_axis_name, with_axis_bound
from shardtrain.functional.model import BLOCKS, Chain, Model, Tree, dim_names, same_structure, with_names
from shardtrain.functional.training_mode import mode_arguments
from shardtrain.sharding.array_dims import is_dims


def is_module(value: Any) -> bool:
    """Whether this is a Flax module itself, which a run cannot use as it is (see `as_model`)."""
    return isinstance(value, nn.Module | nnx.Module)


Factory = Callable[[nnx.Rngs], nnx.Module]


def as_model(model: Any, names: Mapping[str, Sequence[str | None]] | None = None) -> Model:
    """A `Model` as it is, and an nnx factory through `from_nnx`.

    Args:
      model: one of these.
      names: dims that are named from outside, see `with_names`.

    Raises:
      ValueError: anything else; for a linen module the text says what to write.
    """
    if isinstance(model, Model):
        return with_names(model, names or {})
    if isinstance(model, nn.Module):
        raise ValueError(
            f"model is the linen module {type(model).__name__}, whose inputs are not known;"
            " write from_linen(module, jax.ShapeDtypeStruct(...)) with the shape of one batch"
        )
    if isinstance(model, nnx.Module):
        raise ValueError(
            f"model is an nnx module {type(model).__name__} that exists already, whole on one device;"
            " give the function that makes it: lambda rngs: MyModule(..., rngs=rngs)"
        )
    if callable(model):
        return with_names(from_nnx(cast("Factory", model)), names or {})
    raise ValueError(f"model is {model!r}; allowed: a Model, or a function rngs -> nnx.Module")


def from_nnx(factory: Factory, *, sync_batch_norm: bool = False) -> Model:
    """The pure functions of an nnx module.

    Args:
      factory: makes the module from its Rngs; called under jit only, so that no parameter is ever
        whole on one device. Dims come from the parameters' `out_sharding` metadata.
      sync_batch_norm: every nnx.BatchNorm takes the statistics of a microbatch over all replicas, as one
        with an axis_name does; else each replica has its own.

    Returns:
      A `Model`. In training `deterministic` and `use_running_average` are False, else True, in
      every submodule that has them, and so are arguments of `__call__` by the names in `mode_arguments`;
      rngs are refilled from the step's key, and an argument `rngs` gets them too. What a module sows as
      nnx.Intermediate is dropped. A module with `blocks` (an
      nnx.List, or one module whose parameters are stacked), `first(*inputs)`, `run(blocks, stream, keys)`
      and `last(stream)` has a chain; `keys` are the same share of what its `block_keys()` returns, if it
      has that: anything with a first dim of blocks.
    """
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
    modules = [node for _, node in nnx.iter_graph(abstract) if isinstance(node, nnx.Module)]
    own_name = one_axis_name(modules)
    for module in modules:
        if sync_batch_norm and isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = own_name or REPLICAS
    axis_name = one_axis_name(modules)
    graphs = {}
    for train in (True, False):
        view = nnx.view(
            abstract, deterministic=not train, use_running_average=not train, raise_if_not_found=False
        )
        graphs[train], variables, rngs, rest = nnx.split(view, nnx.Param, nnx.RngState, ...)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        with nnx.use_eager_sharding(False):
            module = factory(nnx.Rngs(key))
        _, params, _, model_state = nnx.split(module, nnx.Param, nnx.RngState, ...)
        return _plain(params), _plain(model_state)

    def calling(method: Callable[..., Any]) -> Callable[..., tuple[Any, Tree]]:
        def call(
            params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any
        ) -> tuple[Any, Tree]:
            module = nnx.merge(
                graphs[train], _filled(variables, params), _seeded(rngs, rng), _filled(rest, model_state)
            )
            outputs = method(module, *inputs)
            nnx.pop(module, nnx.Intermediate)
            _, _, _, changed = nnx.split(module, nnx.Param, nnx.RngState, ...)
            return outputs, same_structure(_plain(changed), model_state)

        return with_axis_bound(call, axis_name)

    def whole(params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any) -> tuple[Any, Tree]:
        options: dict[str, Any] = mode_arguments(type(abstract).__call__, train)
        if "rngs" in inspect.signature(type(abstract).__call__).parameters:
            options["rngs"] = nnx.Rngs(jax.random.fold_in(rng, len(nnx.to_flat_state(rngs))))
        return calling(lambda module, *inputs: module(*inputs, **options))(
            params, model_state, rng, train, *inputs
        )

    dims = _nested(
        (path, dim_names(v.get_metadata().get("out_sharding"), v.shape, "/".join(map(str, path))))
        for path, v in nnx.to_flat_state(variables)
    )
    chain = _chain(abstract, dims, calling)
    return Model(init=init, apply=whole, dims=dims, chain=chain, axis_name=axis_name)


Calling = Callable[[Callable[..., Any]], Callable[..., tuple[Any, Tree]]]


def _chain(module: Any, dims: Tree, calling: Calling) -> Chain | None:
    """The chain of an nnx module, None where it has not all of its parts."""
    parts = ("first", "run", "last")
    if not hasattr(module, BLOCKS) or not all(callable(getattr(module, name, None)) for name in parts):
        return None
    stacked = not isinstance(module.blocks, nnx.List)
    names = jax.tree.leaves(dims.get(BLOCKS, {}), is_leaf=is_dims)
    if stacked and not (names and all(n and n[0] == LAYERS for n in names)):
        return None
    num_blocks = jax.tree.leaves(module.blocks)[0].shape[0] if stacked else len(module.blocks)

    def keys(module: Any, start: Any, number: int) -> Any:
        found = module.block_keys() if hasattr(module, "block_keys") else None
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, number), found)

    def run(module: Any, start: Any, number: int, stream: Any) -> Any:
        blocks = module.blocks if stacked else list(module.blocks)[start : start + number]
        return module.run(blocks, stream, keys(module, start, number))

    return Chain(
        num_blocks=num_blocks,
        stacked=stacked,
        first=calling(lambda module, *inputs: module.first(*inputs)),
        run=calling(run),
        last=calling(lambda module, stream: module.last(stream)),
    )


def _nested(items: Any) -> Tree:
    """(path, leaf) pairs as a nested dict; every key a string, also the positions of an nnx.List."""
    tree: Tree = {}
    for path, leaf in items:
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _plain(state: Any) -> Tree:
    flat = ((path, v.get_value()) for path, v in nnx.to_flat_state(state))
    return _nested((path, value) for path, value in flat if not isinstance(value, jax.ShapeDtypeStruct))


def _filled(state: Any, tree: Tree) -> Any:
    """The variables with values from a tree; what is not there stays the shape that it is."""

    def filled(path: Any, variable: Any) -> Any:
        node: Any = tree
        for key in map(str, path):
            if key not in node:
                return variable
            node = node[key]
        return variable.replace(node)

    return nnx.from_flat_state([(path, filled(path, v)) for path, v in nnx.to_flat_state(state)])


def _seeded(state: Any, rng: jax.Array) -> Any:
    """Every rng stream of the module gets a key of its own, and a count of 0."""

    def value(i: int, variable: Any) -> jax.Array:
        if not isinstance(variable, nnx.RngKey):
            return jnp.zeros(variable.shape, variable.dtype)
        key = jax.random.fold_in(rng, i)
        return jax.random.split(key, variable.shape) if variable.shape else key

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, v.replace(value(i, v))) for i, (path, v) in enumerate(flat)])
