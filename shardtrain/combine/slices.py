"""Leaves cut in as many equal slices as there are ranks, and the flat messages that carry them.

Every slice holds the same static share of every leaf. Next: `mean.py`, `adasum.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def cut(leaves: Sequence[jax.Array], parts: int) -> tuple[list[jax.Array], list[int]]:
    """Flat pieces whose sizes `parts` divides, and the leaf of each.

    A leaf whose size does not divide gives two: what divides, which costs no copy, and its last few
    elements, padded with zeros.

    >>> pieces, owners = cut([jnp.arange(5.0)], 2)
    >>> [piece.tolist() for piece in pieces], owners
    ([[0.0, 1.0, 2.0, 3.0], [4.0, 0.0]], [0, 0])
    """
    pieces, owners = [], []
    for i, leaf in enumerate(leaves):
        flat, rest = leaf.reshape(-1), leaf.size % parts
        if leaf.size >= parts:
            pieces.append(flat[: leaf.size - rest])
        if rest:
            pieces.append(jnp.pad(flat[leaf.size - rest :], (0, parts - rest)))
        owners += [i] * (len(pieces) - len(owners))
    return pieces, owners


def uncut(pieces: Sequence[jax.Array], owners: Sequence[int], leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The leaves again, with shapes and dtypes as in `leaves`."""
    whole = []
    for i, leaf in enumerate(leaves):
        mine = [piece for piece, owner in zip(pieces, owners, strict=True) if owner == i]
        flat = jnp.concatenate(mine)[: leaf.size] if mine else jnp.zeros(0)
        whole.append(flat.reshape(leaf.shape).astype(leaf.dtype))
    return whole


def part(x: jax.Array, position: int | jax.Array, parts: int) -> jax.Array:
    """The slice of a flat array at `position` of `parts`."""
    width = x.size // parts
    if isinstance(position, int):
        return x[position * width : (position + 1) * width]
    return lax.dynamic_slice_in_dim(x, position * width, width)


def join(pieces: Sequence[jax.Array]) -> list[jax.Array]:
    """One flat message per dtype."""
    dtypes = list(dict.fromkeys(piece.dtype for piece in pieces))
    return [jnp.concatenate([p for p in pieces if p.dtype == dtype]) for dtype in dtypes]


def split(messages: Sequence[jax.Array], pieces: Sequence[Any]) -> list[jax.Array]:
    """What `join` joined.

    Args:
      messages: (..., C) each; dims before the last are kept.
      pieces: arrays with the sizes and dtypes of what was joined.
    """
    found: list[Any] = [None] * len(pieces)
    for message in messages:
        first = 0
        for i, piece in enumerate(pieces):
            if piece.dtype == message.dtype:
                found[i] = message[..., first : first + piece.size]
                first += piece.size
    return found


def block_sources(size: int, distance: int, radix: int, turn: int) -> list[int]:
    """For each rank the partner from which it hears in a turn.

    Ranks fall into blocks of `distance * radix`; a rank's partners stand `distance` apart in its block.

    >>> block_sources(4, 2, 2, 1)
    [2, 3, 0, 1]
    >>> block_sources(3, 1, 3, 1)
    [1, 2, 0]
    """
    positions = [rank // distance % radix for rank in range(size)]
    return [rank + ((p + turn) % radix - p) * distance for rank, p in enumerate(positions)]


def in_order(turns: Sequence[jax.Array], position: int | jax.Array) -> list[jax.Array]:
    """What came in turns 0 (this rank's own), 1, ..., ordered by the position of the sender."""
    radix = len(turns)
    if isinstance(position, int):
        return [turns[(sender - position) % radix] for sender in range(radix)]
    if radix == 2:  # a select, which XLA folds into whatever reads it
        first = position == 0
        return [jnp.where(first, *turns), jnp.where(first, *turns[::-1])]
    return list(jnp.stack(turns)[(jnp.arange(radix) - position) % radix])
