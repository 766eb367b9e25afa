"""Split leaves into one equal slice for each rank, and pack slices into messages.

Every slice has the same static fraction of every leaf. Leaves of one dtype and size are stacked, so that
programs grow with the number of different sizes only. Next: `mean.py`, `adasum.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LARGE = 1 << 16  # elements of a row from which a message of its own costs less than a copy

Owners = list[list[int]]
"""For each stack, the number of the leaf of each of its pieces."""


def split_into_slices(leaves: Sequence[jax.Array], parts: int) -> tuple[list[jax.Array], Owners]:
    """Split leaves into equal slices.

    Returns:
      (stacks (parts, pieces, width), whose row p holds slice p of each piece; the leaf of each piece).

    A leaf whose size is no multiple of `parts` gives two pieces: the largest multiple, and its last few
    elements, padded with zeros.

    >>> stacks, owners = split_into_slices([jnp.arange(5.0), jnp.arange(4.0)], 2)
    >>> [stack.shape for stack in stacks], owners
    ([(2, 2, 2), (2, 1, 1)], [[0, 1], [0]])
    """
    kinds: dict[Any, list[tuple[int, jax.Array]]] = {}
    for i, leaf in enumerate(leaves):
        flat, rest = leaf.reshape(-1), leaf.size % parts
        pieces = [flat[: leaf.size - rest]] if leaf.size >= parts else []
        pieces += [jnp.pad(flat[leaf.size - rest :], (0, parts - rest))] if rest else []
        for piece in pieces:
            kinds.setdefault((leaf.dtype, piece.size), []).append((i, piece.reshape(parts, 1, -1)))
    # the widest first: a leaf's last few elements come after the rest of it
    ordered = [kinds[kind] for kind in sorted(kinds, key=lambda kind: -kind[1])]
    stacks = [jnp.concatenate([piece for _, piece in pieces], axis=1) for pieces in ordered]
    return stacks, [[i for i, _ in pieces] for pieces in ordered]


def join_slices(
    stacks: Sequence[Sequence[jax.Array]], owners: Owners, leaves: Sequence[Any]
) -> list[jax.Array]:
    """Join the slices of leaves, the reverse of `split_into_slices`.

    Args:
      stacks: each stack as blocks of its rows, in order.
      owners: the owners that `split_into_slices` returned.
      leaves: arrays or shapes, of the shapes wanted.
    """
    pieces: list[list[jax.Array]] = [[] for _ in leaves]
    for blocks, of_stack in zip(stacks, owners, strict=True):
        for j, owner in enumerate(of_stack):
            pieces[owner] += [block[:, j].reshape(-1) for block in blocks]
    flat = [
        jnp.concatenate(x) if x else jnp.zeros(0, leaf.dtype) for x, leaf in zip(pieces, leaves, strict=True)
    ]
    return [x[: leaf.size].reshape(leaf.shape) for x, leaf in zip(flat, leaves, strict=True)]


def take_part(stack: jax.Array, position: int | jax.Array, parts: int) -> jax.Array:
    """Return the rows at `position` of `parts` equal blocks of rows."""
    rows = stack.shape[0] // parts
    if isinstance(position, int):
        return stack[position * rows : (position + 1) * rows]
    return lax.dynamic_slice_in_dim(stack, position * rows, rows)


def pack_messages(stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Pack stacks into messages (rows, C): one for each large stack, one for the small ones of a dtype."""
    flat = [stack.reshape(stack.shape[0], -1) for stack in stacks]
    return [
        flat[which[0]] if len(which) == 1 else jnp.concatenate([flat[i] for i in which], axis=1)
        for which in _group_by_message(stacks)
    ]


def unpack_messages(messages: Sequence[jax.Array], stacks: Sequence[Any]) -> list[jax.Array]:
    """Unpack messages into stacks, the reverse of `pack_messages`.

    Args:
      messages: (rows, C) each.
      stacks: arrays or shapes with the pieces, widths and dtypes of the packed stacks.
    """
    found: list[Any] = [None] * len(stacks)
    for message, which in zip(messages, _group_by_message(stacks), strict=True):
        first = 0
        for i in which:
            _, pieces, width = stacks[i].shape
            columns = message[:, first : first + pieces * width]
            found[i] = columns.reshape(message.shape[0], pieces, width)
            first += pieces * width
    return found


def _group_by_message(stacks: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of the stacks of each message, which do not depend on the number of rows."""
    messages: dict[Any, list[int]] = {}
    for i, stack in enumerate(stacks):
        alone = stack.shape[1] * stack.shape[2] >= LARGE
        messages.setdefault((stack.dtype, i if alone else -1), []).append(i)
    return list(messages.values())


def list_block_sources(size: int, distance: int, radix: int, turn: int) -> list[int]:
    """Return the partner that each rank receives from in a turn.

    Ranks fall into blocks of `distance * radix`; the partners of a rank are `distance` apart in its block.

    >>> list_block_sources(4, 2, 2, 1)
    [2, 3, 0, 1]
    >>> list_block_sources(3, 1, 3, 1)
    [1, 2, 0]
    """
    positions = [rank // distance % radix for rank in range(size)]
    return [rank + ((p + turn) % radix - p) * distance for rank, p in enumerate(positions)]


def order_by_turn(turns: Sequence[jax.Array], position: int | jax.Array) -> list[jax.Array]:
    """Order the arrays received in turns 0 (this rank's own), 1, ... by the position of the sender."""
    radix = len(turns)
    if isinstance(position, int):
        return [turns[(sender - position) % radix] for sender in range(radix)]
    if radix == 2:  # a select, which XLA folds into whatever reads it
        first = position == 0
        return [jnp.where(first, *turns), jnp.where(first, *turns[::-1])]
    return list(jnp.stack(turns)[(jnp.arange(radix) - position) % radix])
