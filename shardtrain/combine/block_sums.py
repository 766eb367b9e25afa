"""Sums of long float32 vectors by blocks, which keep the digits that one running sum loses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512
"""Elements of one float32 partial sum."""


def block_sums(terms: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Return the sums (pieces,) of arrays (rows, pieces, width), all in one pass."""
    if terms[0].shape[-1] <= BLOCK:
        return [x.sum(0) for x in _sum_last(terms)]
    width = terms[0].shape[-1] // BLOCK * BLOCK
    blocks = tuple(x[..., :width].reshape(*x.shape[:-1], -1, BLOCK) for x in terms)
    rest = _sum_last(tuple(x[..., width:] for x in terms))
    return [x + y.sum(0) for x, y in zip(block_sums(_sum_last(blocks)), rest, strict=True)]


def _sum_last(terms: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return sums over the last dim, in one reduction, so that XLA reads what the terms share once."""

    def add(x: Any, y: Any) -> Any:
        return tuple(p + q for p, q in zip(x, y, strict=True))

    return tuple(lax.reduce(terms, tuple(jnp.float32(0) for _ in terms), add, (terms[0].ndim - 1,)))
