"""Check whether pipeline stages can apply an optimizer separately, each to its own parameters.

Next: `train_step/stage_compute.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from shardtrain import axes
from shardtrain.functional.model import Tree
from shardtrain.jaxpr.forward import dependencies
from shardtrain.optim.optimizer_state import make_storable
from shardtrain.sharding.array_dims import is_dims
from shardtrain.system.xla_flags import quick_options

CHANGES = (1e6, 1e30, 1e-30, np.nan)
"""Factors of one layer's gradient, which reveal couplings above or below a threshold; a nan reveals all."""

MIXED_ARRAYS = "the update of one array depends on the gradients of others, as clipping by their norm does"
MIXED_LAYERS = (
    "the update of one layer depends on the gradients of other layers of its stack, as a trust ratio"
    " or a root mean square of the whole stack does"
)
MIXED_SHARES = (
    "a part of the parameters is updated otherwise than in the whole model, as where noise, labels, rates or"
    " norms depend on how many arrays, layers or entries there are"
)
MIXED_ORDER = (
    "the update of a layer depends on its place among the stacked layers, or on their number, as noise, rates"
    " of layers by number, and norms of whole stacks do"
)
FAILS = "it does not update a part of the parameters: "
LAYERS, LARGEST_DIM, NUM_UPDATES = 4, 128, 4
"""Sizes of the arrays on which an optimizer is tried: some treat dims of 128 and more differently."""

LATER = 10_000
"""Added to step counts before the last update: some optimizers couple arrays later, or start with rate 0."""

Arrays = Mapping[tuple[Any, ...], Any]
"""The keys of a path -> array."""


def coupling_problems(optimizer: optax.GradientTransformation, dims: Tree, params: Any) -> list[str]:
    """List how the update of an array, or of a stacked layer, depends on the gradients of others.

    Pipeline stages that each update their own parameters would then differ from an update of all parameters.
    Dependences between arrays are found in the traced update. Dependences between layers are found by trial
    on small random arrays with the gradient of one layer changed (`CHANGES`). Next: `share_problems`.

    Args:
      optimizer: any optax transformation.
      dims: the dim names of the model.
      params: arrays or shapes; only their structure and numbers of dims are used.

    Returns:
      One sentence for each dependence; empty if stages can update separately.

    >>> import numpy as np
    >>> params, dims = {"a": np.ones((2, 2)), "b": np.ones(2)}, {"a": ("embed", "mlp"), "b": ("mlp",)}
    >>> coupling_problems(optax.adam(1e-3), dims, params)
    []
    >>> coupling_problems(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), dims, params)
    ['the update of one array depends on the gradients of others, as clipping by their norm does']
    """
    leaves, structure = jax.tree.flatten(params)
    names = jax.tree.leaves(dims, is_leaf=is_dims)
    stacked = [bool(n) and n[0] == axes.LAYERS for n in names]
    shapes = [
        (4, *[2] * (x.ndim - 1)) if is_stacked else (2,) * x.ndim
        for x, is_stacked in zip(leaves, stacked, strict=True)
    ]
    update = _make_second_update(optimizer, structure)
    random = np.random.default_rng(0)
    inputs = [[random.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(3)]
    traced = jax.make_jaxpr(update)(*inputs)
    arrays = [1 << i for i in range(len(shapes))]
    # the update of each array may depend on that array alone
    found = dependencies(traced, arrays * 3)
    is_mixed = any(groups & ~own for groups, own in zip(found, arrays, strict=True))
    compiled = jax.jit(update, compiler_options=quick_options(jax.default_backend()))
    before = compiled(*inputs)
    are_layers_mixed = False
    for factor in CHANGES if any(stacked) else ():
        # change the first layer of each stack: its other layers must be updated as before
        changed = [
            [
                np.concatenate([x[:1] * np.float32(factor), x[1:]]) if is_stacked else x
                for x, is_stacked in zip(arrays, stacked, strict=True)
            ]
            for arrays in (inputs[0], inputs[2])
        ]
        after = compiled(changed[0], inputs[1], changed[1])
        are_layers_mixed |= not all(
            np.allclose(a[1:], b[1:], rtol=1e-4)
            for a, b, is_stacked in zip(before, after, stacked, strict=True)
            if is_stacked
        )
    return [*([MIXED_ARRAYS] if is_mixed else []), *([MIXED_LAYERS] if are_layers_mixed else [])]


def order_problems(
    optimizer: optax.GradientTransformation, dims: Tree, params: Any, stored_blocks: Sequence[int]
) -> list[str]:
    """List why an optimizer cannot update stacked layers in the order in which a mesh stores them.

    It is tried on small random arrays, in both orders. An optimizer that cannot be tried, such as a line
    search, has no problem here.

    Args:
      optimizer: any optax transformation.
      dims: the dim names of the model.
      params: arrays or shapes.
      stored_blocks: the block at each stored position, -1 for padding, see `pipeline.stacking.Partition`.
    """
    blocks = [block for block in stored_blocks if block >= 0]
    order = np.array([0, 1, 2, 3] if blocks == sorted(blocks) else [0, 2, 1, 3])
    if len(blocks) < len(stored_blocks):
        order = np.insert(order, [1, 3], -1)

    def in_mesh(tree: Arrays) -> Arrays:
        def of_stack(x: Any) -> Any:
            is_real = (order >= 0).reshape(-1, *[1] * (x.ndim - 1))
            return np.where(is_real, x[order], np.float32(0))

        return {key: of_stack(x) if key in stacked else x for key, x in tree.items()}

    stacked, trees = _make_random_trees(dims, params)
    try:
        whole = _compute_updates(optimizer, trees)
    except Exception:  # it needs more than gradients, such as a line search, or is wrong: the step says so
        return []
    places = [list(order).index(layer) for layer in range(LAYERS)]
    found = [
        {key: x[places] if key in stacked else x for key, x in each.items()}
        for each in _compute_updates(optimizer, [in_mesh(tree) for tree in trees])
    ]
    return [] if _are_same(found, whole) else [MIXED_ORDER]


def share_problems(optimizer: optax.GradientTransformation, dims: Tree, params: Any) -> list[str]:
    """List how updates of some arrays and layers differ from updates of the whole model.

    They are tried on small random arrays. `coupling_problems` finds dependences on the gradients of others.

    Args:
      optimizer: any optax transformation, which a stage uses unchanged.
      dims: the dim names of the model.
      params: arrays or shapes.
    """
    stacked, trees = _make_random_trees(dims, params)
    others = [path for path in trees[0] if path not in stacked]
    whole = _compute_updates(optimizer, trees)
    for layers, kept in (
        (slice(LAYERS // 2), others[: len(others) // 2]),
        (slice(LAYERS // 2, None), others[len(others) // 2 :]),
        # halves may have the numbers of the whole modulo something
        (slice(1, None), others[1:]),
    ):

        def share(tree: Arrays, layers: slice = layers, kept: Sequence[Any] = kept) -> Arrays:
            return {k: x[layers] if k in stacked else x for k, x in tree.items() if k in stacked or k in kept}

        if not share(trees[0]):
            continue
        try:
            found = _compute_updates(optimizer, [share(tree) for tree in trees])
        except Exception as error:
            return [f"{FAILS}{str(error).splitlines()[0]}"]
        if not _are_same(found, [share(each) for each in whole]):
            return [MIXED_SHARES]
    return []


def _are_same(found: Sequence[Arrays], expected: Sequence[Arrays]) -> bool:
    return all(
        np.allclose(ours[key], x, rtol=1e-4, atol=1e-4 * np.abs(x).max(initial=0))
        for ours, theirs in zip(found, expected, strict=True)
        for key, x in theirs.items()
    )


def _make_random_trees(dims: Tree, params: Any) -> tuple[set[tuple[Any, ...]], Sequence[Arrays]]:
    """Return the paths of stacked arrays, and random weights and gradients like small parameters."""
    names = jax.tree.leaves(dims, is_leaf=is_dims)
    shapes, stacked = {}, set()
    # the leaves of a tree of jax are in the order of their keys
    for (path, x), named in zip(jax.tree.leaves_with_path(params), names, strict=True):
        key = tuple(getattr(each, "key", getattr(each, "idx", None)) for each in path)
        shapes[key] = tuple(min(size, LARGEST_DIM) for size in x.shape)
        if named and named[0] == axes.LAYERS:
            stacked.add(key)
            shapes[key] = (LAYERS, *shapes[key][1:])
    random = np.random.default_rng(0)
    trees = [
        {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
        for _ in range(1 + NUM_UPDATES)
    ]
    return stacked, trees


def _compute_updates(optimizer: optax.GradientTransformation, trees: Sequence[Arrays]) -> list[Arrays]:
    """Return the updates of weights, the first of these trees, by the gradients in the other trees."""
    used, loss = make_storable(optimizer), jnp.float32(1)
    options = quick_options(jax.default_backend())
    init = jax.jit(used.init, compiler_options=options)
    update = jax.jit(
        lambda grad, state, weights: used.update(grad, state, weights, value=loss, grad=grad),
        compiler_options=options,
    )
    weights, *grads = (unflatten_dict(dict(tree)) for tree in trees)
    state, found = init(weights), []
    for number, grad in enumerate(grads, 1):
        if number == NUM_UPDATES:
            state = jax.tree.map(_add_later, state)
        updates, state = update(grad, state, weights)
        found.append(flatten_dict(jax.tree.map(np.asarray, updates)))
    return found


def _add_later(x: Any) -> Any:
    """Add `LATER` to an array of an optimizer's state if it counts steps."""
    return np.asarray(x) + np.int32(LATER) if jnp.issubdtype(x.dtype, jnp.signedinteger) else x


def _make_second_update(optimizer: optax.GradientTransformation, structure: Any) -> Callable[..., Any]:
    """Return a function: leaves of weights, first and second gradients -> leaves of the second update.

    The second, because the first update of some optimizers does not depend on the size of a gradient.
    """
    used = make_storable(optimizer)

    def update(weights: Any, first_grads: Any, second_grads: Any) -> Any:
        params, first, second = (
            jax.tree.unflatten(structure, arrays) for arrays in (weights, first_grads, second_grads)
        )
        # the loss is that of the whole pipeline, which every stage receives
        loss = jnp.float32(1)
        _, state = used.update(first, used.init(params), params, value=loss, grad=first)
        updates, _ = used.update(second, state, params, value=loss, grad=second)
        return jax.tree.leaves(updates)

    return update
