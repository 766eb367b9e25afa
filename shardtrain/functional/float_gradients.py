"""Differentiate functions whose parameters may be frozen integers or booleans: their gradients are zeros."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def value_and_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `jax.value_and_grad(function, has_aux=True)`, with float32 zeros where there is no gradient.

    >>> grad = value_and_grad(lambda tree: (tree["w"] * tree["table"].sum(), ()))
    >>> grad({"w": jnp.float32(2), "table": jnp.arange(3)})[1]["table"].tolist()
    [0.0, 0.0, 0.0]
    """
    derivative = jax.value_and_grad(function, has_aux=True, allow_int=True)

    def compute(*arguments: Any) -> Any:
        value, grads = derivative(*arguments)
        return value, _fill(grads)

    return compute


def vjp(function: Callable[..., Any], *primals: Any) -> Any:
    """Return `jax.vjp(function, *primals, has_aux=True)`, with float32 zeros where there is no gradient."""
    outputs, pull, auxiliary = jax.vjp(function, *primals, has_aux=True)
    return outputs, lambda cotangents: _fill(pull(cotangents)), auxiliary


def _fill(grads: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape) if x.dtype == jax.dtypes.float0 else x, grads)
