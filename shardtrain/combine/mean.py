"""The mean over all examples of all ranks, and the sum of the ranks' means.

Next: `adasum.py`, for replicas that should not simply be averaged.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.combine.combiner import Combined, Combiner, contribution, flatten
from shardtrain.combine.group import Group
from shardtrain.combine.slices import block_sources, cut, join, part, split, uncut


def mean() -> Combiner:
    """The mean over all examples: sum_r count_r x_r / sum_r count_r, zeros if there are none.

    Sums are float32. float32 leaves cross in one all-reduce, with the counts: 4 (n + P) bytes in the
    buffer, so a ring sends 8 (n + P) (P - 1) / P per rank. Leaves of 16 bits cross as such, in slices:
    each rank sums the slice of its own and gives it to the others, 4 n (P - 1) / P bytes sent per rank.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce, section 3 (reduce-scatter, all-gather).

    >>> import jax
    >>> from shardtrain.combine.group import MeshGroup
    >>> combine = lambda x, count: mean().combine(x, count, (), MeshGroup("data", 2)).value
    >>> jax.vmap(combine, axis_name="data")(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])).tolist()
    [2.0, 2.0]
    """
    return Combiner(lambda tree: (), lambda *arguments: _combine(*arguments, summed=False), linear=True)


def sum() -> Combiner:
    """The sum of the ranks' means, as the mean over all examples times the number of ranks with any.

    Costs what `mean` costs. Equal counts: sum_r x_r.
    """
    return Combiner(lambda tree: (), lambda *arguments: _combine(*arguments, summed=True), linear=True)


def _combine(tree: Any, count: Any, state: Any, group: Group, *, summed: bool) -> Combined:
    leaves, structure = flatten(tree)
    count = jnp.asarray(count, jnp.float32)
    mine = [contribution(leaf, count) for leaf in leaves]
    dtypes = {dtype: [i for i, x in enumerate(mine) if x.dtype == dtype] for dtype in (x.dtype for x in mine)}
    wide = [mine[i] for i in dtypes.pop(jnp.dtype(jnp.float32), [])]
    marks = jnp.where(jnp.arange(group.size) == group.index, count, 0)
    reduced = group.all_reduce(jnp.concatenate([marks, *(x.reshape(-1) * count for x in wide)]))
    counts, sums = reduced[: group.size], reduced[group.size :]
    factor = jnp.where(summed, jnp.sum(counts != 0), 1) / jnp.where(counts.sum() == 0, 1, counts.sum())
    found = {jnp.dtype(jnp.float32): iter(split([sums * factor], wide))}
    lost: list[Any] = [jnp.zeros(x.shape) for x in mine]
    for dtype, which in dtypes.items():
        values, rounded_off = _combine_narrow([mine[i] for i in which], counts, factor, group)
        found[dtype] = iter(values)
        for i, x in zip(which, rounded_off, strict=True):
            lost[i] = x / jnp.where(count * factor == 0, 1, count * factor)
    values = [next(found[x.dtype]).reshape(x.shape) for x in mine]
    return Combined(*(jax.tree.unflatten(structure, values), state, {}, jax.tree.unflatten(structure, lost)))


def _combine_narrow(
    leaves: list[jax.Array], counts: jax.Array, factor: jax.Array, group: Group
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Leaves of one dtype of 16 bits; also what this rank rounded off the slice that it added up."""
    size, index = group.size, group.index
    pieces, owners = cut(leaves, size)
    exact: list[Any] = [0.0] * bool(pieces)
    for turn in range(size):
        # the slice of the rank that hears from this one
        message = join([part(piece, (index - turn) % size, size) for piece in pieces])
        if turn:
            message = [group.exchange(x, block_sources(size, 1, size, turn)) for x in message]
        weight = counts[(index + turn) % size] * factor
        exact = [s + weight * x.astype(jnp.float32) for s, x in zip(exact, message, strict=True)]
    rounded = [x.astype(leaves[0].dtype) for x in exact]
    mine = (jnp.arange(size) == index)[:, None]
    lost = [jnp.where(mine, x - r.astype(jnp.float32), 0) for x, r in zip(exact, rounded, strict=True)]
    return (
        _whole([group.all_gather(x) for x in rounded], pieces, owners, leaves),
        _whole(lost, pieces, owners, leaves),
    )


def _whole(
    messages: list[jax.Array], pieces: list[jax.Array], owners: list[int], leaves: list[jax.Array]
) -> list[jax.Array]:
    """Leaves from messages (size, C), one row per rank, in the dtype of the messages."""
    dtype = messages[0].dtype if messages else leaves[0].dtype
    rows = [jax.ShapeDtypeStruct((p.size // messages[0].shape[0],), dtype) for p in pieces]
    shapes = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf in leaves]
    return uncut([row.reshape(-1) for row in split(messages, rows)], owners, shapes)
