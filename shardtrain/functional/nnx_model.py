"""The pure functions of an nnx module.

Next: `model.py` (what they are), `activation_rules.py` (under which they are traced).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.axes import LAYERS
from shardtrain.functional.auxiliary import AUXILIARY, Outputs
from shardtrain.functional.batch_norm import REPLICAS, one_axis_name, with_axis_bound
from shardtrain.functional.model import BLOCKS, Chain, Model, Tree, dim_names, same_structure, with_names
from shardtrain.functional.training_mode import mode_arguments
from shardtrain.sharding.array_dims import is_dims


def is_module(value: Any) -> bool:
    """Return whether this is a Flax module instance, which a run cannot use directly (see `as_model`)."""
    return isinstance(value, nn.Module | nnx.Module)


Factory = Callable[[nnx.Rngs], nnx.Module]


def as_model(model: Any, names: Mapping[str, Sequence[str | None]] | None = None) -> Model:
    """Return a `Model` unchanged, and that of an nnx factory by `from_nnx`.

    Args:
      model: one of these.
      names: dim names given outside the model, see `with_names`.

    Raises:
      ValueError: anything else; for a linen or nnx module the message says what to write.
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
            f"model is an nnx module {type(model).__name__} that is already initialised on one device;"
            " give the function that makes it: lambda rngs: MyModule(..., rngs=rngs)"
        )
    if callable(model):
        return with_names(from_nnx(cast("Factory", model)), names or {})
    raise ValueError(f"model is {model!r}; allowed: a Model, or a function rngs -> nnx.Module")


def from_nnx(factory: Factory, *, sync_batch_norm: bool = False) -> Model:
    """Return the pure functions of an nnx module.

    Args:
      factory: makes the module from its Rngs; called only under jit, so that no parameter is ever stored
        unsharded on one device. Dims come from the parameters' `out_sharding` metadata.
      sync_batch_norm: every nnx.BatchNorm takes the statistics of a microbatch over all replicas, like one
        with an axis_name; otherwise each replica has its own.

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
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
    split = _split(abstract, _axis_name(abstract, sync_batch_norm))

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        with nnx.use_eager_sharding(False):
            module = factory(nnx.Rngs(key))
        _, params, _, model_state = nnx.split(module, nnx.Param, nnx.RngState, ...)
        return _plain(params), _plain(model_state)

    def apply(params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any) -> tuple[Any, Tree]:
        options: dict[str, Any] = mode_arguments(type(abstract).__call__, train)
        if "rngs" in inspect.signature(type(abstract).__call__).parameters:
            # a key that no stream of the module has
            options["rngs"] = nnx.Rngs(jax.random.fold_in(rng, len(nnx.to_flat_state(split.rngs))))
        call = split.pure(lambda module, *inputs: _asked(module, *inputs, **options))
        return call(params, model_state, rng, train, *inputs)

    dims = _nested(
        (path, dim_names(v.get_metadata().get("out_sharding"), v.shape, "/".join(map(str, path))))
        for path, v in nnx.to_flat_state(split.params)
    )
    chain = _chain(abstract, dims, split.pure)
    return Model(init=init, apply=apply, dims=dims, chain=chain, axis_name=split.axis_name)


def _asked(call: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call a module, or its method, with `Outputs` if it has losses of its own (`auxiliary.py`)."""
    if AUXILIARY not in inspect.signature(call).parameters:
        return call(*inputs, **options)
    outputs, auxiliary = call(*inputs, **options, **{AUXILIARY: True})
    return outputs if auxiliary is None else Outputs(outputs, auxiliary)


def _axis_name(abstract: nnx.Module, sync_batch_norm: bool) -> str | None:
    """Return the axis name of a module's norms, after setting that of all BatchNorms if asked to."""
    modules = [node for _, node in nnx.iter_graph(abstract) if isinstance(node, nnx.Module)]
    own_name = one_axis_name(modules)
    for module in modules:
        if sync_batch_norm and isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = own_name or REPLICAS
    return one_axis_name(modules)


@dataclass(frozen=True, kw_only=True)
class _SplitModule:
    """An nnx module split into its graph and its variables, which are shapes only.

    Args:
      graphs: whether it trains -> its graph definition.
      params: the parameters.
      rngs: the rng streams.
      model_state: all other variables.
      axis_name: the axis name of its norms over replicas.
    """

    graphs: Mapping[bool, Any]
    params: Any
    rngs: Any
    model_state: Any
    axis_name: str | None

    def pure(self, method: Callable[..., Any]) -> Callable[..., tuple[Any, Tree]]:
        """Return a method of the module as a pure function.

        It maps (params, model_state, rng, train, *inputs) to (outputs, model_state)."""

        def call(
            params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any
        ) -> tuple[Any, Tree]:
            module = nnx.merge(
                self.graphs[train],
                _filled(self.params, params),
                _seeded(self.rngs, rng),
                _filled(self.model_state, model_state),
            )
            outputs = method(module, *inputs)
            if isinstance(outputs, Outputs):
                outputs = replace(outputs, train=train)
            nnx.pop(module, nnx.Intermediate)
            _, _, _, changed = nnx.split(module, nnx.Param, nnx.RngState, ...)
            return outputs, same_structure(_plain(changed), model_state)

        return with_axis_bound(call, self.axis_name)


def _split(abstract: nnx.Module, axis_name: str | None) -> _SplitModule:
    graphs, variables = {}, ()
    for train in (True, False):
        view = nnx.view(
            abstract, deterministic=not train, use_running_average=not train, raise_if_not_found=False
        )
        graphs[train], *variables = nnx.split(view, nnx.Param, nnx.RngState, ...)
    params, rngs, model_state = variables
    return _SplitModule(graphs=graphs, params=params, rngs=rngs, model_state=model_state, axis_name=axis_name)


Pure = Callable[[Callable[..., Any]], Callable[..., tuple[Any, Tree]]]
"""See `_SplitModule.pure`."""


def _chain(module: Any, dims: Tree, pure: Pure) -> Chain | None:
    """Return the chain of an nnx module, None unless it has all parts of one."""
    parts = ("first", "run", "last")
    if not hasattr(module, BLOCKS) or not all(callable(getattr(module, name, None)) for name in parts):
        return None
    stacked = not isinstance(module.blocks, nnx.List)
    names = jax.tree.leaves(dims.get(BLOCKS, {}), is_leaf=is_dims)
    # stacked blocks can be sliced by number only if every parameter counts blocks first
    if stacked and not (names and all(n and n[0] == LAYERS for n in names)):
        return None
    num_blocks = jax.tree.leaves(module.blocks)[0].shape[0] if stacked else len(module.blocks)

    def keys(module: Any, start: Any, number: int) -> Any:
        # a stage uses the keys of its own blocks among those of all
        found = module.block_keys() if hasattr(module, "block_keys") else None
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, number), found)

    def run(module: Any, start: Any, number: int, activations: Any) -> Any:
        blocks = module.blocks if stacked else list(module.blocks)[start : start + number]
        return module.run(blocks, activations, keys(module, start, number))

    return Chain(
        num_blocks=num_blocks,
        stacked=stacked,
        first=pure(lambda module, *inputs: module.first(*inputs)),
        run=pure(run),
        last=pure(lambda module, activations: _asked(module.last, activations)),
    )


def _nested(items: Any) -> Tree:
    """Return (path, leaf) pairs as a nested dict with string keys, also for positions in an nnx.List."""
    tree: Tree = {}
    for path, leaf in items:
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _plain(state: Any) -> Tree:
    """Return the values of an nnx state as a nested dict, without variables that are shapes only."""
    flat = ((path, v.get_value()) for path, v in nnx.to_flat_state(state))
    return _nested((path, value) for path, value in flat if not isinstance(value, jax.ShapeDtypeStruct))


def _filled(state: Any, tree: Tree) -> Any:
    """Return the variables with values from a tree; variables that it lacks stay shapes."""

    def filled(path: Any, variable: Any) -> Any:
        node: Any = tree
        for key in map(str, path):
            if key not in node:
                return variable
            node = node[key]
        return variable.replace(node)

    return nnx.from_flat_state([(path, filled(path, v)) for path, v in nnx.to_flat_state(state)])


def _seeded(state: Any, rng: jax.Array) -> Any:
    """Return the variables of the rng streams: a key for each stream, and counts of 0."""

    def value(i: int, variable: Any) -> jax.Array:
        if not isinstance(variable, nnx.RngKey):
            return jnp.zeros(variable.shape, variable.dtype)
        key = jax.random.fold_in(rng, i)
        return jax.random.split(key, variable.shape) if variable.shape else key

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, v.replace(value(i, v))) for i, (path, v) in enumerate(flat)])
