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


def coupled(optimizer: optax.GradientTransformation, dims: Tree, params: Any) -> list[str]:
    """Whether an update of one array, or of one layer of a stacked array, depends on another's gradient.

    Where stages update apart from each other that would not be the update of the whole. It is tried out, on
    small random arrays of the same structure: what the optimizer does with shapes alone is not seen.

    Args:
      optimizer: any.
      dims: the model's dims.
      params: arrays or shapes, for their structure.

    Returns:
      What depends on what, in sentences; nothing where all is apart.

    >>> import numpy as np
    >>> params, dims = {"a": np.ones((2, 2)), "b": np.ones(2)}, {"a": ("embed", "mlp"), "b": ("mlp",)}
    >>> coupled(optax.adam(1e-3), dims, params)
    []
    >>> coupled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), dims, params)
    ['the update of one array depends on the gradients of others, as clipping by their norm does']
    """
    used = stored(optimizer)
    leaves, structure = jax.tree.flatten(params)
    names = jax.tree.leaves(dims, is_leaf=is_dims)
    stacked = [bool(n) and n[0] == axes.LAYERS for n in names]
    shapes = [
        (4, *[2] * (x.ndim - 1)) if is_stacked else (2,) * x.ndim
        for x, is_stacked in zip(leaves, stacked, strict=True)
    ]
    random = np.random.default_rng(0)

    def draw() -> list[np.ndarray]:
        return [random.normal(size=shape).astype(np.float32) for shape in shapes]

    weights, first, second = draw(), draw(), draw()

    def updates(change: Callable[[int, np.ndarray], np.ndarray]) -> list[np.ndarray]:
        """Of the second step, with the weights and gradients of some changed."""
        changed = [[change(i, x) for i, x in enumerate(tree)] for tree in (weights, second)]
        weights_, second_ = (jax.tree.unflatten(structure, tree) for tree in changed)
        # the loss is that of all stages, which every stage is told
        state = used.init(weights_)
        first_ = jax.tree.unflatten(structure, first)
        _, state = used.update(first_, state, weights_, value=jnp.float32(1), grad=first_)
        found, _ = used.update(second_, state, weights_, value=jnp.float32(1), grad=second_)
        return [np.asarray(x) for x in jax.tree.leaves(found)]

    every_other = updates(lambda i, x: x * np.float32(1e6) if i % 2 else x)
    one_layer = updates(lambda i, x: np.concatenate([x[:1] * np.float32(1e6), x[1:]]) if stacked[i] else x)
    before = updates(lambda i, x: x)
    same = [np.allclose(a, b, rtol=1e-4) for a, b in zip(before[::2], every_other[::2], strict=True)]
    alike = [
        np.allclose(a[1:], b[1:], rtol=1e-4)
        for a, b, is_stacked in zip(before, one_layer, stacked, strict=True)
        if is_stacked
    ]
    problems = []
    if not all(same):
        problems.append(
            "the update of one array depends on the gradients of others, as clipping by their norm does"
        )
    if not all(alike):
        problems.append(
            "the update of one layer depends on the gradients of other layers of its stack, as a trust ratio"
            " or a root mean square of the whole stack does"
        )
    return problems
