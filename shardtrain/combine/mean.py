"""Combine by the mean over all examples of all ranks, or by the sum of the ranks' means.

Next: `adasum.py`, for replicas that should not simply be averaged.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardtrain.combine.combiner import Combined, Combiner, flatten, mask_without_examples
from shardtrain.combine.group import Group
from shardtrain.combine.slices import (
    join_slices,
    list_block_sources,
    pack_messages,
    split_into_slices,
    take_part,
    unpack_messages,
)

LARGE = 1 << 18
"""Elements of a float32 leaf from which a message of its own costs less than copies into and out of one."""


def mean() -> Combiner:
    """The mean over all examples: sum_r count_r x_r / sum_r count_r, zeros if there are none.

    Sums are float32. float32 leaves are sent in one all-reduce, with the counts, and leaves of `LARGE`
    elements or more in one each: 4 (n + P) bytes altogether, so a ring sends 8 (n + P) (P - 1) / P per rank.
    Leaves of 16 bits are sent as they are, in slices: a reduce-scatter, whose sums are float32, then an
    all-gather, 4 n (P - 1) / P bytes sent per rank.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce, section 3 (reduce-scatter, all-gather).

    >>> import jax
    >>> from shardtrain.combine.group import MeshGroup
    >>> combine = lambda x, count: mean().combine(x, count, (), MeshGroup("data", 2)).value
    >>> jax.vmap(combine, axis_name="data")(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])).tolist()
    [2.0, 2.0]
    """
    return Combiner(lambda tree: (), lambda *arguments: _combine(*arguments, summed=False), linear=True)


def sum() -> Combiner:
    """The sum of the ranks' means: the mean over all examples times the number of ranks with any.

    Costs what `mean` costs. Equal counts: sum_r x_r.

    >>> import jax
    >>> from shardtrain.combine.group import MeshGroup
    >>> combine = lambda x, count: sum().combine(x, count, (), MeshGroup("data", 2)).value
    >>> jax.vmap(combine, axis_name="data")(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])).tolist()
    [4.0, 4.0]
    """
    return Combiner(lambda tree: (), lambda *arguments: _combine(*arguments, summed=True), linear=True)


def add_up(tree: Any, group: Group) -> Any:
    """Sum the leaves of a tree, of float32 or 16 bits, over all ranks.

    The mean of weighted sums, such as gradients of a summed loss, is their total divided by the total count,
    which needs no further pass over memory. Small leaves are sent in one all-reduce, and leaves of `LARGE`
    elements or more in one each. Leaves of 16 bits are sent as they are, and added in float32, as in `mean`.
    """
    leaves, structure = jax.tree.flatten(tree)
    narrow = [i for i, leaf in enumerate(leaves) if leaf.dtype.itemsize == 2]
    small = [i for i, leaf in enumerate(leaves) if leaf.size < LARGE and i not in narrow]
    found = [leaf if i in (*small, *narrow) else group.all_reduce(leaf) for i, leaf in enumerate(leaves)]
    if narrow:
        sums, _ = _combine_narrow([leaves[i] for i in narrow], jnp.ones(group.size), jnp.ones(()), group)
        for i, x in zip(narrow, sums, strict=True):
            found[i] = x
    if small:
        packed = group.all_reduce(jnp.concatenate([leaves[i].reshape(-1) for i in small]))
        for i, x in zip(small, unpack(packed, [leaves[i] for i in small]), strict=True):
            found[i] = x
    return jax.tree.unflatten(structure, found)


def _combine(tree: Any, count: Any, state: Any, group: Group, *, summed: bool) -> Combined:
    leaves, structure = flatten(tree)
    count = jnp.asarray(count, jnp.float32)
    # float32 is summed as it is; 16 bits are rounded, and the rounding error is returned as a residual
    by_dtype: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(i)
    wide = by_dtype.pop(jnp.dtype(jnp.float32), [])
    packed = [i for i in wide if leaves[i].size < LARGE]
    sums, counts = _sum_weighted([leaves[i] for i in packed], count, group)
    # the weighted mean, or that times the number of replicas with examples
    num_means = jnp.where(summed, jnp.sum(counts != 0), 1)
    total = jnp.where(counts.sum() == 0, 1, counts.sum())
    factor = num_means / total
    values: list[Any] = [None] * len(leaves)
    residual: list[Any] = [jnp.zeros(leaf.shape) for leaf in leaves]
    for i, x in zip(packed, sums, strict=True):
        values[i] = x * factor
    # the counts are known by now, so a large leaf is weighted once, and its sum is the result
    for i in (i for i in wide if leaves[i].size >= LARGE):
        values[i] = group.all_reduce(mask_without_examples(leaves[i], count) * (num_means * count / total))
    for which in by_dtype.values():
        found, rounded_off = _combine_narrow([leaves[i] for i in which], counts, factor, group)
        for i, x, off in zip(which, found, rounded_off, strict=True):
            values[i] = x
            residual[i] = off / jnp.where(count * factor == 0, 1, count * factor)
    return Combined(jax.tree.unflatten(structure, values), state, {}, jax.tree.unflatten(structure, residual))


def _sum_weighted(
    leaves: list[jax.Array], count: jax.Array, group: Group
) -> tuple[list[jax.Array], jax.Array]:
    """Return the weighted sums of float32 leaves over all ranks, and the ranks' counts."""
    mark = (jnp.arange(group.size) == group.index).astype(jnp.float32)
    # packed before it is weighted: a bare concatenation copies memory, one with arithmetic works by elements
    packed = lax.optimization_barrier(jnp.concatenate([*(x.reshape(-1) for x in leaves), mark]))
    reduced = group.all_reduce(mask_without_examples(packed, count) * count)
    num_values = reduced.size - group.size
    return unpack(reduced[:num_values], leaves), reduced[num_values:]


def unpack(packed: jax.Array, leaves: Sequence[Any]) -> list[jax.Array]:
    """Split a concatenation into arrays of the shapes of the leaves.

    Args:
      packed: array (n,).
      leaves: arrays or shapes of n elements altogether.
    """
    ends = np.cumsum([0, *(leaf.size for leaf in leaves)])
    return [
        packed[first : first + leaf.size].reshape(leaf.shape)
        for first, leaf in zip(ends[:-1], leaves, strict=True)
    ]


def _combine_narrow(
    leaves: list[jax.Array], counts: jax.Array, factor: jax.Array, group: Group
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Combine leaves of one 16-bit dtype; also return the rounding error of this rank's slice."""
    size, index = group.size, group.index
    stacks, owners = split_into_slices(leaves, size)
    if not stacks:
        return leaves, [jnp.zeros(leaf.shape) for leaf in leaves]
    exact: list[Any] = [0.0] * len(stacks)
    for turn in range(size):
        # send the slice of the rank that receives from this one
        messages = pack_messages([take_part(stack, (index - turn) % size, size) for stack in stacks])
        if turn:
            messages = [group.exchange(x, list_block_sources(size, 1, size, turn)) for x in messages]
        count = counts[(index + turn) % size]
        received = [
            mask_without_examples(x.astype(jnp.float32), count) for x in unpack_messages(messages, stacks)
        ]
        exact = [e + x * (count * factor) for e, x in zip(exact, received, strict=True)]
    rounded = [x.astype(leaves[0].dtype) for x in exact]
    mine = (jnp.arange(size) == index)[:, None, None]
    residual = [jnp.where(mine, x - r.astype(jnp.float32), 0) for x, r in zip(exact, rounded, strict=True)]
    whole = [group.all_gather(message[0]) for message in pack_messages(rounded)]
    floats = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in leaves]
    blocks, residuals = ([[x] for x in stacks] for stacks in (unpack_messages(whole, stacks), residual))
    return join_slices(blocks, owners, leaves), join_slices(residuals, owners, floats)
