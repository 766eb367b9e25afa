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
from shardtrain.functional.dependencies import dependencies
from shardtrain.functional.model import Tree
from shardtrain.optim.optimizer_state import stored
from shardtrain.sharding.array_dims import is_dims
from shardtrain.system.xla_flags import quick_options

CHANGES = (1e6, 1e30, 1e-30, np.nan)
"""Factors of one layer, for couplings that begin above or below a size; a nan gets through them all."""

MIXED_ARRAYS = "the update of one array depends on the gradients of others, as clipping by their norm does"
MIXED_LAYERS = (
    "the update of one layer depends on the gradients of other layers of its stack, as a trust ratio"
    " or a root mean square of the whole stack does"
)


def coupling_problems(optimizer: optax.GradientTransformation, dims: Tree, params: Any) -> list[str]:
    """List how the update of an array, or of a layer of a stacked array, depends on gradients of others.

    Pipeline stages that each update their own parameters would then differ from an update of all parameters.
    Dependences between arrays are followed through the traced update, whatever the values are. Those between
    layers are found by trial on small random arrays with the gradient of one layer changed (`CHANGES`), so a
    dependence on shapes is not detected.

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
    update = _second_update(optimizer, structure)
    random = np.random.default_rng(0)
    inputs = [[random.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(3)]
    traced = jax.make_jaxpr(update)(*inputs).jaxpr
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


def _second_update(optimizer: optax.GradientTransformation, structure: Any) -> Callable[..., Any]:
    """Return a function: leaves of weights, first and second gradients -> leaves of the second update.

    The second, because the first update of some optimizers does not depend on the size of a gradient.
    """
    used = stored(optimizer)

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
