"""Which optimizers pipeline stages can apply separately, each to its own parameters.

Next: `train_step/stage_step.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardtrain import axes
from shardtrain.functional.model import Tree
from shardtrain.optim.optimizer_state import stored
from shardtrain.sharding.array_dims import is_dims

Arrays = list[np.ndarray]
"""The leaves of a tree of parameters, in order."""

MIXED_ARRAYS = "the update of one array depends on the gradients of others, as clipping by their norm does"
MIXED_LAYERS = (
    "the update of one layer depends on the gradients of other layers of its stack, as a trust ratio"
    " or a root mean square of the whole stack does"
)


def coupling_problems(optimizer: optax.GradientTransformation, dims: Tree, params: Any) -> list[str]:
    """List how the update of an array, or of a layer of a stacked array, depends on gradients of others.

    Pipeline stages that each update their own parameters would then differ from an update of all parameters.
    Found by trial on small random arrays of the same structure, so a dependence on shapes is not detected.

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
    update = _second_update(optimizer, shapes, structure)
    before = update(lambda i, x: x)
    # scale every other array: the arrays in between must be updated as before
    others_scaled = update(lambda i, x: x * np.float32(1e6) if i % 2 else x)
    arrays_alike = all(map(_close, before[::2], others_scaled[::2]))
    # scale the first layer of each stack: its other layers must be updated as before
    layer_scaled = update(lambda i, x: np.concatenate([x[:1] * np.float32(1e6), x[1:]]) if stacked[i] else x)
    layers_alike = all(
        _close(a[1:], b[1:])
        for a, b, is_stacked in zip(before, layer_scaled, stacked, strict=True)
        if is_stacked
    )
    return [*([] if arrays_alike else [MIXED_ARRAYS]), *([] if layers_alike else [MIXED_LAYERS])]


def _second_update(
    optimizer: optax.GradientTransformation, shapes: list[tuple[int, ...]], structure: Any
) -> Callable[[Callable[[int, np.ndarray], np.ndarray]], Arrays]:
    """Return a function: change of (index, array) of weights and second gradients -> the second update.

    The second, because the first update of some optimizers does not depend on the size of a gradient.
    """
    used = stored(optimizer)
    random = np.random.default_rng(0)

    def draw() -> Arrays:
        return [random.normal(size=shape).astype(np.float32) for shape in shapes]

    weights, first_grads, second_grads = draw(), draw(), draw()

    def update(change: Callable[[int, np.ndarray], np.ndarray]) -> Arrays:
        changed = ([change(i, x) for i, x in enumerate(arrays)] for arrays in (weights, second_grads))
        params, second = (jax.tree.unflatten(structure, arrays) for arrays in changed)
        first = jax.tree.unflatten(structure, first_grads)
        # the loss is that of the whole pipeline, which every stage receives
        loss = jnp.float32(1)
        _, state = used.update(first, used.init(params), params, value=loss, grad=first)
        updates, _ = used.update(second, state, params, value=loss, grad=second)
        return [np.asarray(x) for x in jax.tree.leaves(updates)]

    return update


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-4)
