"""A model as pure functions over plain dicts of arrays, made from an nnx module.

Everything past this is a plain nested dict of arrays; no Flax object takes part in a step.
Next: `linen_model.py`, the same for linen modules; `activation_rules.py`, under which they are traced.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.axes import LAYERS
from shardtrain.errors.messages import problems_error
from shardtrain.sharding.resolve import JOINT, Dims, Named, dims_by_pattern

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
      axis_name: under which it averages statistics over replicas, as BatchNorm(axis_name="batch") does;
        None where each replica has its own. Where no such axis is bound, `apply` averages over one.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    apply: Callable[..., tuple[Any, Tree]]
    dims: Tree
    chain: Chain | None = None
    axis_name: str | None = None


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


REPLICAS = "replicas"
"""The axis name of norms that are synchronised by request."""


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


def dim_names(given: Any, shape: Sequence[int], path: str) -> Dims:
    """The names of an array's dims, whatever Flax was given: one a dim, None where it is not sharded.

    Args:
      given: names, tuples of names and None in a tuple, a PartitionSpec or a NamedSharding; None: no names.
      shape: of the array. Dims without an entry at the end are not sharded.
      path: of the array, for errors.

    Raises:
      ValueError: anything else.

    >>> dim_names(PartitionSpec(("data", "fsdp"), None, "mlp"), (8, 2, 4, 3), "up")
    ('data+fsdp', None, 'mlp', None)
    """
    spec = given.spec if isinstance(given, NamedSharding) else given
    if spec is None:
        return None
    if not isinstance(spec, tuple | list | PartitionSpec) or not all(map(_is_entry, spec)):
        raise ValueError(
            f"{path} has the names {given!r}; give a name, None or a tuple of names for each of its"
            f" {len(shape)} dims, as in ('embed', None) or PartitionSpec(('data', 'fsdp'), None)"
        )
    names = [
        entry if isinstance(entry, str) else JOINT.join(entry or ()) or None
        for entry in (None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec)
    ]
    return (*names, *(None,) * (len(shape) - len(names)))


def _is_entry(entry: Any) -> bool:
    """Whether a spec may have this for a dim."""
    if isinstance(entry, tuple | list):
        return all(isinstance(name, str) for name in entry)
    return entry is None or isinstance(entry, str) or entry is PartitionSpec.UNCONSTRAINED


MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}
"""Arguments that tell a module whether it trains: name -> the value in training."""


def mode_arguments(function: Callable[..., Any], train: bool) -> dict[str, bool]:
    """The arguments of a function that tell it whether it trains.

    >>> mode_arguments(lambda x, deterministic: x, train=True)
    {'deterministic': False}
    """
    known = inspect.signature(function).parameters
    return {name: train == value for name, value in MODES.items() if name in known}


def same_structure(changed: Tree, before: Tree) -> Tree:
    """The model state after a call.

    Raises:
      ValueError: it has arrays that it had not before, or others of another shape.
    """
    shapes = [
        {path_text(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (before, changed)
    ]
    problems = [
        f"{path}: {shapes[0].get(path, 'not there')} -> {shapes[1].get(path, 'not there')}"
        for path in dict.fromkeys([*shapes[0], *shapes[1]])
        if shapes[0].get(path) != shapes[1].get(path)
    ]
    if problems:
        raise problems_error(
            "a call changes the structure of the model's state, and a step must keep it; return what is sown,"
            " or leave its collection out, as from_linen(..., without=('losses',))",
            problems,
        )
    return changed


NO_BATCH_NORMS = (
    *(nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm),
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm),
)


def one_axis_name(modules: Iterable[Any]) -> str | None:
    """The axis name over which modules average statistics of the batch; None if none does.

    Raises:
      ValueError: there are several names, or a norm of single examples averages over them.
    """
    having = [m for m in modules if isinstance(getattr(m, "axis_name", None), str)]
    names = sorted({m.axis_name for m in having})
    problems = [
        f"{type(m).__name__}(axis_name={m.axis_name!r}) takes means over features, and an axis of replicas"
        " has none; leave axis_name out, sharded features need none here"
        for m in having
        if isinstance(m, NO_BATCH_NORMS)
    ]
    if len(names) > 1:
        problems.append(f"there are the axis names {names}; use one, as all of them mean the replicas")
    if problems:
        raise problems_error("statistics cannot be averaged over replicas", list(dict.fromkeys(problems)))
    return names[0] if names else None


def with_axis_bound(call: Callable[..., Any], axis_name: str | None) -> Callable[..., Any]:
    """A function that may be called where its axis name is not bound: there it averages over one replica."""
    if axis_name is None:
        return call

    def bound(*arguments: Any) -> Any:
        try:
            jax.lax.axis_size(axis_name)
        except NameError:
            alone = jax.vmap(
                lambda: call(*arguments), in_axes=(), out_axes=None, axis_name=axis_name, axis_size=1
            )
            return alone()
        return call(*arguments)

    return bound


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


def with_names(model: Model, names: Mapping[str, Sequence[str | None]]) -> Model:
    """The model with dims named from outside, see `Run.names`; all others keep their own.

    Raises:
      ValueError: the patterns do not fit, see `resolve.dims_by_pattern`.
    """
    if not names:
        return model
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    shapes = {path_text(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    found = dims_by_pattern(shapes, names)
    dims = jax.tree.map_with_path(
        lambda path, own: (
            dim_names(found[name], shapes[name], name) if (name := path_text(path)) in found else own
        ),
        model.dims,
        is_leaf=lambda x: x is None or isinstance(x, tuple),
    )
    return replace(model, dims=dims)


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
