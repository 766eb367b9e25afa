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
from jax.sharding import Mesh

from shardtrain.layout import Named, Rules, near, problems_error, repeated

Tree = dict[str, Any]
"""A nested dict with string keys and arrays (or what stands for them) as leaves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model as pure functions over plain dicts of arrays; hashable, and equal to itself alone.

    Args:
      init: key -> (params, model_state). model_state holds what is not trained but changes
        (running statistics); it is {} for most models.
      apply: (params, model_state, rng, train, *inputs) -> (outputs, model_state).
      dims: like params, with a tuple of dim names for each leaf, or None where it has no names.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    apply: Callable[..., tuple[Any, Tree]]
    dims: Tree


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
      every submodule that has them; rngs are refilled from the step's key.
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

    def apply(params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any) -> tuple[Any, Tree]:
        module = nnx.merge(
            graphs[train], _filled(variables, params), _seeded(rngs, rng), _filled(rest, model_state)
        )
        outputs = module(*inputs)
        _, _, _, changed = nnx.split(module, nnx.Param, nnx.RngState, ...)
        return outputs, _plain(changed)

    dims = _nested(
        (path, _names(v.get_metadata().get("out_sharding"))) for path, v in nnx.to_flat_state(variables)
    )
    return Model(init=init, apply=apply, dims=dims)


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
    return _nested((path, v.get_value()) for path, v in nnx.to_flat_state(state))


def _filled(state: Any, tree: Tree) -> Any:
    def leaf(path: Any) -> Any:
        node: Any = tree
        for key in map(str, path):
            node = node[key]
        return node

    return nnx.from_flat_state([(path, v.replace(leaf(path))) for path, v in nnx.to_flat_state(state)])


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
def activation_rules(rules: Rules, mesh: Mesh) -> Iterator[None]:
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
