"""A model as pure functions over plain nested dicts of arrays; no Flax object takes part in a step.

Next: `nnx_model.py` and `linen_model.py`, which make one from a Flax module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.errors.messages import problems_error, refuse
from shardtrain.functional.rng import Draws, new_key
from shardtrain.sharding.array_dims import JOINT, Dims, NamedArray, dims_by_pattern, is_dims

Tree = dict[str, Any]
"""A nested dict with string keys and arrays (or shapes, specs, dims) as leaves."""


BLOCKS = "blocks"
"""The key of the blocks of a chain in its parameters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """A model as a sequence of blocks for a pipeline: `apply` calls first, run for all blocks, and last.

    The activations between blocks are a tree of arrays whose first dim is the batch. Each function accepts
    the parameters and the part of the model state that it uses.

    Args:
      num_blocks: number of blocks.
      stacked: the parameters of all blocks are stacked along the first dim in `params["blocks"]`, so all
        blocks have equal shapes; otherwise block i has `params["blocks"][str(i)]`.
      first: (params, model_state, rng, train, *inputs) -> (activations, model_state).
      run: (params, model_state, rng, train, start, number, activations) -> (activations, model_state): the
        `number` blocks from `start` on. Stacked blocks are passed as their `number` rows; `start` may be
        traced.
      last: (params, model_state, rng, train, activations) -> (outputs, model_state).
    """

    num_blocks: int
    stacked: bool
    first: Callable[..., tuple[Any, Tree]]
    run: Callable[..., tuple[Any, Tree]]
    last: Callable[..., tuple[Any, Tree]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model as pure functions over plain dicts of arrays; hashable, and equal only to itself.

    Args:
      init: key -> (params, model_state). model_state has the arrays that change without being trained
        (running statistics); {} for most models.
      apply: (params, model_state, rng, train, *inputs) -> (outputs, model_state).
      dims: like params, with a tuple of dim names for each leaf, None for a leaf without names.
      chain: the same model as a sequence of blocks; None if it does not define its blocks.
      axis_name: the axis over which it averages batch statistics, like BatchNorm(axis_name="batch"); None
        if each replica has its own. Where the axis is not bound, `apply` runs as with one replica.
      frozen: paths of the parameters that are not trained, see `frozen.py`.
      draws: the random draws in training, see `checks.row_draws.find_draws`; None before they are searched.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    apply: Callable[..., tuple[Any, Tree]]
    dims: Tree
    chain: Chain | None = None
    axis_name: str | None = None
    frozen: frozenset[str] = frozenset()
    draws: Draws | None = None


def wrap_functions(model: Model, wrap: Callable[[Callable[..., Any], bool], Callable[..., Any]]) -> Model:
    """Return the model with `apply` and the functions of its chain wrapped.

    Args:
      model: the model.
      wrap: (function, whether it returns the outputs of the model) -> the new function.
    """
    chain = model.chain
    if chain is not None:
        chain = replace(
            chain, first=wrap(chain.first, False), run=wrap(chain.run, False), last=wrap(chain.last, True)
        )
    return replace(model, apply=wrap(model.apply, True), chain=chain)


def map_parameters(model: Model, change: Callable[[str, Any], Any]) -> Model:
    """Return the model whose functions replace each parameter x by change(path, x)."""

    def wrap(function: Callable[..., Any], _: bool) -> Callable[..., Any]:
        def call(params: Tree, *rest: Any) -> Any:
            return function(jax.tree.map_with_path(lambda path, x: change(path_text(path), x), params), *rest)

        return call

    return wrap_functions(model, wrap)


def gather_unnamed(model: Model) -> Model:
    """Return the model with constraints that gather its parameters without dim names before a call.

    Without them XLA may reduce activations over the devices instead of gathering a weight.
    """
    leaves = jax.tree.leaves_with_path(model.dims, is_leaf=is_dims)
    unnamed = {path_text(path) for path, dims in leaves if dims is None}

    def gather(path: str, x: Any) -> Any:
        if path not in unnamed or jax.sharding.get_abstract_mesh().empty:
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec())

    return map_parameters(model, gather)


def dim_names(given: Any, shape: Sequence[int], path: str) -> Dims:
    """Return one name per dim of an array, from any form that Flax accepts; None if it is not sharded.

    Args:
      given: names, tuples of names and None in a tuple, a PartitionSpec or a NamedSharding; or None.
      shape: the shape of the array. Names of trailing dims that are not sharded may be left out.
      path: the path of the array, for errors.

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
    """Return whether this is a valid entry of a spec."""
    if isinstance(entry, tuple | list):
        return all(isinstance(name, str) for name in entry)
    return entry is None or isinstance(entry, str) or entry is PartitionSpec.UNCONSTRAINED


def keep_structure(changed: Tree, before: Tree) -> Tree:
    """Return the model state after a call if it has the structure that it had before.

    Leading dims of 1, which statistics with kept dims have after their first update, are dropped.

    Raises:
      ValueError: lists every array that was added, is missing or has another shape.
    """
    changed = jax.tree.map_with_path(_keep_dims(before), changed)
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
        advice = "return what is sown, or leave its collection out, as from_linen(..., without=('losses',))"
        if shapes[0].keys() == shapes[1].keys():
            advice = "initialise each array with the shape that it has after a call"
        raise problems_error(
            f"a call changes the structure of the model's state, and a step must keep it; {advice}", problems
        )
    return changed


def _keep_dims(before: Tree) -> Callable[..., Any]:
    """Return (path, array) -> the array with its previous shape, if only leading dims of 1 differ."""
    shapes = {path: jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(before)}

    def restore(path: Any, x: Any) -> Any:
        old, new = shapes.get(path), jnp.shape(x)
        if old is None or old == new or (1,) * (len(new) - len(old)) + old != new:
            return x
        return jnp.reshape(x, old)

    return restore


def name_parameters(model: Model, names: Mapping[str, Sequence[str | None]]) -> Model:
    """Return the model with dim names from outside, see `Run.names`; other parameters keep their own.

    Raises:
      ValueError: the patterns do not fit, see `array_dims.dims_by_pattern`.
    """
    if not names:
        return model
    params, _ = jax.eval_shape(model.init, new_key(0))
    shapes = {path_text(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    found = dims_by_pattern(shapes, names)
    dims = jax.tree.map_with_path(
        lambda path, own: (
            dim_names(found[name], shapes[name], name) if (name := path_text(path)) in found else own
        ),
        model.dims,
        is_leaf=is_dims,
    )
    return replace(model, dims=dims)


def check_float_parameters(model: Model) -> None:
    """Check that parameters have gradients.

    Raises:
      ValueError: lists the parameters that are not floats.
    """
    params, _ = jax.eval_shape(model.init, new_key(0))
    wrong = [
        f"{path_text(path)} is {leaf.dtype}"
        for path, leaf in jax.tree.leaves_with_path(params)
        if not jnp.issubdtype(leaf.dtype, jnp.floating) and path_text(path) not in model.frozen
    ]
    refuse(
        "parameters are trained, so they are floats; make these constants of the model, as self.table ="
        " jnp.arange(8), or variables of its state, as nnx.Variable(...); complex ones are two"
        " parameters, of real and of imaginary parts",
        wrong,
    )


def name_arrays(model: Model, shapes: Tree) -> dict[str, NamedArray]:
    """Return path -> dim names and shape of every parameter, for `resolve`.

    Args:
      model: for its dims.
      shapes: the params of `jax.eval_shape(model.init, key)`.
    """
    dims = jax.tree.leaves(model.dims, is_leaf=is_dims)
    leaves = jax.tree.leaves_with_path(shapes)
    return {
        path_text(path): NamedArray(dims=names, shape=leaf.shape)
        for names, (path, leaf) in zip(dims, leaves, strict=True)
    }


def path_text(path: Any) -> str:
    """Format a jax key path: `blocks/attention/q`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def group_by_path(tree: Any) -> dict[str, Any]:
    """Return path -> leaf of a tree of arrays, shapes or PartitionSpecs."""
    return {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
