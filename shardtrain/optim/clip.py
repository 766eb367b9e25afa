"""Clip gradients by their norm, which a step may have computed already.

Next: `optimizer.py`, which clips before the update.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_gradients(grads: Any, norm: jax.Array, largest: float) -> Any:
    """Scale gradients down to the largest norm if their norm is above it.

    Source: Pascanu et al., On the difficulty of training recurrent neural networks, 2012, algorithm 1.

    >>> clip_gradients({"w": jnp.array([3.0, 4.0])}, jnp.float32(5.0), 2.5)["w"].tolist()
    [1.5, 2.0]
    """
    # one factor: a quotient of each element would be written to memory, where several moments read it
    factor = jnp.where(norm < largest, 1.0, largest / norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


class TakesNorm(optax.GradientTransformationExtraArgs):
    """A transformation whose `update` accepts `grad_norm`, the norm of the gradient, if it is known.

    A step that may be skipped updates in a branch, in which XLA would compute the norm a second time. Other
    transformations do not receive it: the line searches of optax refuse arguments that they do not know.
    """


def clip_by_norm(largest: float) -> TakesNorm:
    """Return `optax.clip_by_global_norm` that uses a given norm, and computes it otherwise.

    Args:
      largest: the largest norm of a gradient.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, grad_norm: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        return clip_gradients(updates, norm, largest), state

    return TakesNorm(optax.init_empty_state, update)
