"""Vector halving and distance doubling for any number of ranks: each level exchanges parts of slices.

Levels of radix 2, then one of radix `odd`; the results are gathered on the same way back. Next: `adasum.py`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardtrain.combine.group import Group
from shardtrain.combine.slices import block_sources, in_order, pack_messages, part, unpack_messages

Stacks = Sequence[jax.Array]


def levels(size: int) -> list[tuple[int, int]]:
    """Return (radix, distance) of each level: twos, then the odd factor.

    >>> levels(8), levels(12), levels(1)
    ([(2, 1), (2, 2), (2, 4)], [(2, 1), (2, 2), (3, 4)], [])
    """
    found, distance = [], 1
    while size // distance % 2 == 0:
        found.append((2, distance))
        distance *= 2
    return found + [(size // distance, distance)] * (size > distance)


def scatter(stacks: Stacks, radix: int, distance: int, group: Group) -> list[list[jax.Array]]:
    """Send each partner its part of this rank's rows; return the messages received in each turn."""
    position = group.index // distance % radix
    received = []
    for turn in range(1, radix):
        sources = block_sources(group.size, distance, radix, turn)
        given = pack_messages([part(x, (position - turn) % radix, radix) for x in stacks])
        received.append([group.exchange(message, sources) for message in given])
    return received


def rows_in_order(
    stacks: Stacks, received: list[list[jax.Array]], radix: int, distance: int, group: Group
) -> list[list[jax.Array]]:
    """Return this rank's part of the rows of each rank of its block, by the position of that rank."""
    position = group.index // distance % radix
    own = [part(x, position, radix) for x in stacks]
    turns = [own, *(unpack_messages(messages, own) for messages in received)]
    by_stack = [in_order(of_stack, position) for of_stack in zip(*turns, strict=True)]
    return [list(rows) for rows in zip(*by_stack, strict=True)]


def gather(stacks: Stacks, group: Group) -> list[list[jax.Array]]:
    """Gather the rows of all ranks, level by level in reverse: for each stack blocks of rows, in order."""
    blocks = [[message] for message in pack_messages(stacks)]
    for radix, distance in reversed(levels(group.size)):
        blocks = [_block_rows(rows, radix, distance, group) for rows in blocks]
    by_block = [unpack_messages(rows, stacks) for rows in zip(*blocks, strict=True)]
    return [list(rows) for rows in zip(*by_block, strict=True)]


def _block_rows(rows: list[jax.Array], radix: int, distance: int, group: Group) -> list[jax.Array]:
    """Exchange blocks of consecutive rows with the partners of one level; return all of them in order."""
    position = group.index // distance % radix
    turns = [rows[0] if len(rows) == 1 else jnp.concatenate(rows)]
    for turn in range(1, radix):
        turns.append(group.exchange(turns[0], block_sources(group.size, distance, radix, turn)))
    ordered = in_order(turns, position)
    if isinstance(position, int):  # its own are in pieces still: they need not be put together yet
        return [*ordered[:position], *rows, *ordered[position + 1 :]]
    return ordered
