"""The one door to Flax: an nnx or linen module in, pure init and apply functions and dims out.

Everything past this door is a plain nested dict of arrays; no Flax object takes part in a step.
Also `activation_rules`, under which Flax's own activation constraints follow a layout, strictly.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from shardtrain.axes import LAYERS
from shardtrain.layout import Named, Rules, near, problems_error, repeated

Tree = dict[str, Any]
"""A nested dict with string keys and arrays (or what stands for them) as leaves."""


BLOCKS = "blocks"
"""Where the parameters of a chain's blocks stand."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """A model as blocks in a row, which a pipeline cuts: `apply` is first, run over all blocks, last.

    What goes from block to block is the stream: a tree of arrays, each with the rows of the batch first.
    Every function may be given fewer parameters and less model state than the whole model has: those that
    it uses.

    Args:
      num_blocks: how many blocks there are.
      stacked: the parameters of all blocks stand in `params["blocks"]` along a first dim, so that any
        block's fit any other; else block i has `params["blocks"][str(i)]`.
      first: (params, model_state, rng, train, *inputs) -> (stream, model_state).
      run: (params, model_state, rng, train, start, number, stream) -> (stream, model_state): the blocks
        from `start` on. Stacked blocks are given as `number` rows, and `start` may be traced.
      last: (params, model_state, rng, train, stream) -> (outputs, model_state).
    """

    num_blocks: int
    stacked: bool
    first: Callable[..., tuple[Any, Tree]]
    run: Callable[..., tuple[Any, Tree]]
    last: Callable[..., tuple[Any, Tree]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model as pure functions over plain dicts of arrays; hashable, and equal to itself alone.

    Args:
      init: key -> (params, model_state). model_state holds what is not trained but changes
        (running statistics); it is {} for most models.
      apply: (params, model_state, rng, train, *inputs) -> (outputs, model_state).
      dims: like params, with a tuple of dim names for each leaf, or None where it has no names.
      chain: the same model as blocks in a row; None for one that does not say what its blocks are.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    apply: Callable[..., tuple[Any, Tree]]
    dims: Tree
    chain: Chain | None = None


def is_module(value: Any) -> bool:
    """Whether this is a Flax module itself, which a run cannot use as it is (see `as_model`)."""
    return isinstance(value, nn.Module | nnx.Module)


Factory = Callable[[nnx.Rngs], nnx.Module]


def as_model(model: Any) -> Model:
    """A `Model` as it is, and an nnx factory through `from_nnx`.

    Raises:
      ValueError: anything else; for a linen module the text says what to write.
    """
    if isinstance(model, Model):
        return model
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
        return from_nnx(cast("Factory", model))
    raise ValueError(f"model is {model!r}; allowed: a Model, or a function rngs -> nnx.Module")


def from_nnx(factory: Factory) -> Model:
    """The pure functions of an nnx module.

    Args:
      factory: makes the module from its Rngs; called under jit only, so that no parameter is ever
        whole on one device. Dims come from the parameters' `out_sharding` metadata.

    Returns:
      A `Model`. In training `deterministic` and `use_running_average` are False, else True, in
      every submodule that has them; rngs are refilled from the step's key. A module with `blocks` (an
      nnx.List, or one module whose parameters are stacked), `first(*inputs)`, `run(blocks, stream, keys)`
      and `last(stream)` has a chain; `keys` are the same share of what its `block_keys()` returns, if it
      has that: anything with a first dim of blocks.
    """
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
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
            _, _, _, changed = nnx.split(module, nnx.Param, nnx.RngState, ...)
            return outputs, _plain(changed)

        return call

    dims = _nested(
        (path, _names(v.get_metadata().get("out_sharding"))) for path, v in nnx.to_flat_state(variables)
    )
    apply = calling(lambda module, *inputs: module(*inputs))
    return Model(init=init, apply=apply, dims=dims, chain=_chain(abstract, dims, calling))


Calling = Callable[[Callable[..., Any]], Callable[..., tuple[Any, Tree]]]


def _chain(module: Any, dims: Tree, calling: Calling) -> Chain | None:
    """The chain of an nnx module, None where it has not all of its parts."""
    parts = ("first", "run", "last")
    if not hasattr(module, BLOCKS) or not all(callable(getattr(module, name, None)) for name in parts):
        return None
    stacked = not isinstance(module.blocks, nnx.List)
    names = jax.tree.leaves(dims.get(BLOCKS, {}), is_leaf=lambda x: x is None or isinstance(x, tuple))
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


def _names(out_sharding: Any) -> tuple[str | None, ...] | None:
    return None if out_sharding is None else tuple(out_sharding)


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


def from_linen(module: nn.Module, *inputs: Any, rng_streams: tuple[str, ...] = ("dropout",)) -> Model:
    """The pure functions of a linen module.

    Args:
      module: dims come from `nn.with_partitioning`. If `__call__` has an argument `train` or
        `deterministic` it is given.
      *inputs: arrays or jax.ShapeDtypeStruct of one batch, any batch size.
      rng_streams: the rng streams that the module draws from while training.
    """
    names = inspect.signature(type(module).__call__).parameters

    def mode(train: bool) -> dict[str, Any]:
        return {
            name: value for name, value in (("train", train), ("deterministic", not train)) if name in names
        }

    def variables(key: jax.Array) -> dict[str, Tree]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        return dict(module.init({"params": key}, *zeros, **mode(False)))

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        model_state = nn.unbox(variables(key))
        return model_state.pop("params", {}), model_state

    def apply(params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any) -> tuple[Any, Tree]:
        rngs = {name: jax.random.fold_in(rng, i) for i, name in enumerate(rng_streams)}
        mutable = list(model_state) if train else []
        outputs, changed = module.apply(
            {"params": params, **model_state}, *inputs, **mode(train), rngs=rngs, mutable=mutable
        )
        return outputs, {**model_state, **changed}

    def is_boxed(leaf: Any) -> bool:
        return isinstance(leaf, nn.Partitioned)

    boxed = jax.eval_shape(variables, jax.random.key(0)).get("params", {})
    dims = jax.tree.map(lambda leaf: leaf.names if is_boxed(leaf) else None, boxed, is_leaf=is_boxed)
    return Model(init=init, apply=apply, dims=dims)


class _Ask:
    """A dim name that is equal to none, and remembers the names that it was compared with."""

    def __init__(self) -> None:
        self.names: list[str | None] = []

    def __eq__(self, name: object) -> bool:
        self.names.append(name)  # type: ignore[arg-type]
        return False

    __hash__ = object.__hash__


class _StrictRules(tuple):
    """(dim, axes) rules that refuse what Flax would pass over; a tuple, for Flax insists on one.

    Flax replicates unknown names and drops the second of two dims on one axis, silently. It looks
    for each rule's name among the dims of the array in turn: the first, an `_Ask`, sees them all.
    """

    def __iter__(self) -> Iterator[tuple[Any, tuple[str, ...] | None]]:
        rules: Rules = dict(super().__iter__())
        ask = _Ask()
        yield ask, None
        dims = [name for name in ask.names if isinstance(name, str)]
        problems = [f"no rule for dim {near(dim, rules)}" for dim in dims if dim not in rules]
        used = repeated(axis for dim in dims for axis in rules.get(dim, ()))
        problems += [f"axis {axis!r} shards {n} dims of one array" for axis, n in used]
        if problems:
            raise problems_error(f"activation dims {tuple(ask.names)} cannot be placed", problems)
        yield from ((dim, dim_axes or None) for dim, dim_axes in rules.items())


_RULES_IN_USE: Any = jax.make_user_context(default_value=None)
"""Part of the key of jax's trace caches: without it a block traced under one layout is used in another."""


@contextmanager
def activation_rules(rules: Rules, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """While a function is traced under this, its `nn.with_logical_constraint` follow these rules.

    Args:
      rules: dim -> axes for activations.
      mesh: the mesh that has these axes.

    Raises:
      ValueError: (at the constraint) a dim without a rule, or an axis used twice in one array.
    """
    pairs = tuple(rules.items())
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(_StrictRules(pairs)),
        _RULES_IN_USE(pairs),
    ):
        yield


def named_arrays(model: Model, shapes: Tree) -> dict[str, Named]:
    """path -> dims and shape of every parameter, for `layout.resolve`.

    Args:
      model: for its dims.
      shapes: the params of `jax.eval_shape(model.init, key)`.
    """
    dims = jax.tree.leaves(model.dims, is_leaf=lambda x: x is None or isinstance(x, tuple))
    leaves = jax.tree.leaves_with_path(shapes)
    return {
        path_text(path): Named(dims=names, shape=leaf.shape)
        for names, (path, leaf) in zip(dims, leaves, strict=True)
    }


def path_text(path: Any) -> str:
    """A jax key path as people write it: `blocks/attention/q`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
