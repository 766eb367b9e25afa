"""Adasum: add gradients that are orthogonal, and average gradients that are parallel.

It sends the bytes of an all-reduce plus scalars, for any number of ranks (Maleki et al. 2021; Horovod).
Next: `slices.py` (slices of leaves), `exponents.py` (range of dot products).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.combine.combiner import Combined, Combiner, flatten, mask_without_examples
from shardtrain.combine.exponents import LEAST, exponent, power
from shardtrain.combine.group import Group, Op
from shardtrain.combine.slices import (
    Owners,
    join_slices,
    list_block_sources,
    order_by_turn,
    pack_messages,
    split_into_slices,
    take_part,
    unpack_messages,
)

BLOCK = 512
"""Elements of one float32 partial sum."""


def sum_blocks(terms: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Return the sums (pieces,) of arrays (rows, pieces, width), all in one pass."""
    if terms[0].shape[-1] <= BLOCK:
        return [x.sum(0) for x in _sum_last(terms)]
    width = terms[0].shape[-1] // BLOCK * BLOCK
    blocks = tuple(x[..., :width].reshape(*x.shape[:-1], -1, BLOCK) for x in terms)
    rest = _sum_last(tuple(x[..., width:] for x in terms))
    return [x + y.sum(0) for x, y in zip(sum_blocks(_sum_last(blocks)), rest, strict=True)]


def _sum_last(terms: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return sums over the last dim, in one reduction, so that XLA reads what the terms share once."""

    def add(x: Any, y: Any) -> Any:
        return tuple(p + q for p, q in zip(x, y, strict=True))

    return tuple(lax.reduce(terms, tuple(jnp.float32(0) for _ in terms), add, (terms[0].ndim - 1,)))


Stacks = Sequence[jax.Array]


def list_levels(size: int) -> list[tuple[int, int]]:
    """Return (radix, distance) of each level: twos, then the odd factor.

    >>> list_levels(8), list_levels(12), list_levels(1)
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
        sources = list_block_sources(group.size, distance, radix, turn)
        given = pack_messages([take_part(x, (position - turn) % radix, radix) for x in stacks])
        received.append([group.exchange(message, sources) for message in given])
    return received


def order_rows(
    stacks: Stacks, received: list[list[jax.Array]], radix: int, distance: int, group: Group
) -> list[list[jax.Array]]:
    """Return this rank's part of the rows of each rank of its block, ordered by the position of that rank."""
    position = group.index // distance % radix
    own = [take_part(x, position, radix) for x in stacks]
    turns = [own, *(unpack_messages(messages, own) for messages in received)]
    by_stack = [order_by_turn(of_stack, position) for of_stack in zip(*turns, strict=True)]
    return [list(rows) for rows in zip(*by_stack, strict=True)]


def gather(stacks: Stacks, group: Group) -> list[list[jax.Array]]:
    """Gather the rows of all ranks, level by level in reverse: for each stack blocks of rows, in order."""
    blocks = [[message] for message in pack_messages(stacks)]
    for radix, distance in reversed(list_levels(group.size)):
        blocks = [_gather_block_rows(rows, radix, distance, group) for rows in blocks]
    by_block = [unpack_messages(rows, stacks) for rows in zip(*blocks, strict=True)]
    return [list(rows) for rows in zip(*by_block, strict=True)]


def _gather_block_rows(rows: list[jax.Array], radix: int, distance: int, group: Group) -> list[jax.Array]:
    """Exchange blocks of consecutive rows with the partners of one level; return all of them in order."""
    position = group.index // distance % radix
    turns = [rows[0] if len(rows) == 1 else jnp.concatenate(rows)]
    for turn in range(1, radix):
        turns.append(group.exchange(turns[0], list_block_sources(group.size, distance, radix, turn)))
    ordered = order_by_turn(turns, position)
    if isinstance(position, int):  # its own are in pieces still: they need not be put together yet
        return [*ordered[:position], *rows, *ordered[position + 1 :]]
    return ordered


Per = str | Callable[[str], str]

TINY = float(jnp.finfo(jnp.float32).tiny)
ABSENT = -1000  # the exponent of a rank without examples


def adasum(per: Per = "leaf") -> Combiner:
    """The adaptive sum of gradients or deltas, which adds orthogonal ones and averages parallel ones.

    Ranks are combined by a tree of consecutive pairs. A pair makes (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2)
    b: a + b if they are orthogonal, their mean if they are parallel. The odd rank of a round waits for the
    next. Ranks are not weighted by their counts, but a rank with count 0 contributes nothing. Each slice is
    computed on one rank and gathered by the others, so the result has the same bits on all ranks. A single
    rank keeps its tree.

    Bytes sent per rank for n bytes of leaves, L of them, on P = 2^m odd ranks: 2 n (P - 1) / P in messages,
    besides one all-gather of 4 L bytes, per level one all-reduce of 12 L bytes (the last level, of radix
    `odd`, has one in each round of its tree, of 12 L bytes per pair), and one of 8 L at the end.

    Numbers: leaves of 16 bits are sent as they are, and rounded to their dtype after each level; all
      arithmetic
    is float32. Each rank's leaf is scaled by a power of two for the dot products, so that any
    normal magnitude works; what is 2^-124 of its leaf's greatest element may be flushed to zero, and a
    sum that cancels to below 1e-19 of the pair that made it counts as zero.

    Args:
      per: which vectors are compared: each "leaf", the "whole" tree as one vector, or groups of leaves, given
        by a function from a leaf's path, such as "blocks/up", to the name of its group.

    Returns:
      A combiner; its metric "orthogonality" (L,) is ||Adasum(g)||^2 / sum_r ||g_r||^2 of each leaf, or of its
      group: 1 for orthogonal or zero gradients, 1/P for equal ones.

    Raises:
      ValueError: `per` is something else.

    Source: Maleki et al. 2021, Scaling distributed training with adaptive summation, sections 3 and 4,
    algorithm 1; the tree for other than powers of two is ours.

    >>> from shardtrain.combine.group import MeshGroup
    >>> combine = lambda x: adasum().combine(x, 1.0, (), MeshGroup("data", 2)).value
    >>> on_ranks = jax.jit(jax.vmap(combine, axis_name="data"))
    >>> on_ranks(jnp.array([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    >>> on_ranks(jnp.array([[1.0, 0.0], [3.0, 0.0]])).tolist()
    [[2.0, 0.0], [2.0, 0.0]]
    """
    if per not in ("leaf", "whole") and not callable(per):
        raise ValueError(f"adasum per {per!r}; allowed: 'leaf', 'whole' or a function from path to group")

    def combine(tree: Any, count: Any, state: Any, group: Group) -> Combined:
        leaves, structure = flatten(tree)
        count = jnp.asarray(count, jnp.float32)
        values, orthogonality = _combine_leaves(leaves, count, _make_units(tree, per), group)
        return Combined(jax.tree.unflatten(structure, values), state, {"orthogonality": orthogonality})

    is_whole = per == "whole"
    return Combiner(lambda tree: (), combine, across_leaves=per != "leaf", is_one_vector=is_whole)


class _Units(NamedTuple):
    """Groups of leaves that share coefficients: leaf i belongs to unit `of_leaf[i]`."""

    of_leaf: tuple[int, ...]
    number: int
    stages: bool = False  # the only unit has the leaves of all stages of a pipeline

    def sum(self, x: jax.Array) -> jax.Array:
        """Add up values of leaves (..., L) to those of units (..., units)."""
        if self.number == len(self.of_leaf):
            return x
        return jnp.zeros((*x.shape[:-1], self.number)).at[..., jnp.array(self.of_leaf)].add(x)

    def max(self, x: jax.Array) -> jax.Array:
        """Return the greatest exponent of each unit: (L,) to (units,)."""
        if self.number == len(self.of_leaf):
            return x
        return jnp.full(self.number, ABSENT, jnp.int32).at[jnp.array(self.of_leaf)].max(x)


def _make_units(tree: Any, per: Per) -> _Units:
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree.leaves_with_path(tree)]
    if callable(per):
        names = [per(path) for path in paths]
    else:
        names = [str(i) if per == "leaf" else "" for i in range(len(paths))]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return _Units(tuple(numbers[name] for name in names), len(numbers), stages=per == "whole")


class _Node(NamedTuple):
    """A node of the tree: this rank's rows of each stack, and the exponents of its units."""

    stacks: Sequence[jax.Array]
    exponents: jax.Array


class _Context(NamedTuple):
    """The constants of one call: the leaves of each stack, the units, the group."""

    owners: Owners
    units: _Units
    group: Group

    def per_leaf(self, of_stacks: Sequence[jax.Array]) -> jax.Array:
        """Add up values (k, pieces) of each stack by leaf: (k, L)."""
        flat = jnp.concatenate(of_stacks, axis=1)
        owners = jnp.array([owner for of_stack in self.owners for owner in of_stack])
        return jnp.zeros((flat.shape[0], len(self.units.of_leaf))).at[:, owners].add(flat)

    def whole(self, x: jax.Array, op: Op = "sum") -> jax.Array:
        """Reduce values of shards (..., L) to those of whole leaves, see `Group.whole`."""
        return self.group.whole(x, op, stages=self.units.stages)

    def select_stack_units(self, i: int, x: jax.Array) -> jax.Array:
        """Return the entries of a vector of units for the pieces of stack i: (pieces, 1)."""
        return x[jnp.array([self.units.of_leaf[owner] for owner in self.owners[i]])][:, None]


def _combine_leaves(
    leaves: list[jax.Array], count: jax.Array, units: _Units, group: Group
) -> tuple[list[jax.Array], jax.Array]:
    """Return the combined leaves, and the orthogonality of each."""
    stacks, owners = split_into_slices(leaves, group.size)
    if group.size == 1 or not stacks:
        return [mask_without_examples(leaf, count) for leaf in leaves], jnp.ones(len(leaves))
    context = _Context(owners, units, group)
    own = _find_exponents(stacks, context)
    # a rank without examples is marked by its exponent: zeroing its leaves would be a pass over all elements
    exponents = group.all_gather(jnp.where(count != 0, own, ABSENT))
    squares = jnp.zeros(units.number)
    # each level joins `radix` neighbouring blocks of ranks, and leaves a rank 1 / radix of its rows
    for radix, distance in list_levels(group.size):
        blocks = exponents.reshape(-1, distance, units.number).max(1)
        first = group.index // (distance * radix) * radix
        # a rank gets its own part of the rows from every block
        received = scatter(stacks, radix, distance, group)
        level = _Level(
            rows=partial(order_rows, stacks, received, radix, distance, group),
            exponents=[lax.dynamic_index_in_dim(blocks, first + i, keepdims=False) for i in range(radix)],
            span=distance * radix,
            anyone=exponents.max() != ABSENT,
        )
        stacks, norms = _combine_level(level, [x.dtype for x in stacks], context)
        if distance == 1:
            squares = lax.dynamic_index_in_dim(norms, group.index % radix, keepdims=False)
    # at the end every rank has one slice of the result: gather them
    scale = jnp.maximum(exponents.max(0), LEAST)
    orthogonality = _measure_orthogonality(stacks, scale, squares * power(2 * (own - scale)), context)
    return join_slices(gather(stacks, group), owners, leaves), orthogonality


def _find_exponents(stacks: Sequence[jax.Array], context: _Context) -> jax.Array:
    """Return the exponent of each unit's greatest element: (units,)."""
    leaves = jnp.full(len(context.units.of_leaf), LEAST, jnp.int32)
    for stack, owners in zip(stacks, context.owners, strict=True):
        leaves = leaves.at[jnp.array(owners)].max(exponent(stack, axis=(0, 2)))
    return context.units.max(context.whole(leaves, "max"))


class _Level(NamedTuple):
    """The nodes of a level; `rows()` computes theirs again for each reader, so that slices are not copied."""

    rows: Callable[[], list[list[jax.Array]]]
    exponents: list[jax.Array]
    span: int
    anyone: jax.Array


def _combine_level(level: _Level, dtypes: list[Any], context: _Context) -> tuple[list[jax.Array], jax.Array]:
    """Combine the nodes of one level pair by pair.

    Returns:
      (the rows of the one node that is left, the squared norms of all nodes (radix, units)).
    """
    rows, exponents = level.rows, level.exponents
    norms: list[Any] = [None] * len(exponents)
    known: list[int | None] = list(range(len(exponents)))
    while len(exponents) > 1:
        nodes = [_Node(*node) for node in zip(rows(), exponents, strict=True)]
        # one message of scalars a round: the dot products of all pairs
        num_pairs = len(nodes) // 2
        pairs = [(nodes[2 * i], nodes[2 * i + 1]) for i in range(num_pairs)]
        shards = context.whole(jnp.stack([_compute_dots(a, b, context) for a, b in pairs]))
        dots = context.group.all_reduce(context.units.sum(shards), level.span)
        for i, node in enumerate(known[: 2 * num_pairs]):
            if node is not None:
                norms[node] = dots[i // 2, 1 + i % 2]
        # an odd node waits for the next round
        known = [None] * num_pairs + known[2 * num_pairs :]
        rows = partial(list, _combine_round(rows, exponents, dots, dtypes, level.anyone, context))
        exponents = [jnp.maximum(a.exponents, b.exponents) for a, b in pairs] + exponents[2 * num_pairs :]
    return rows()[0], jnp.stack(norms)


def _combine_round(
    rows: Callable[[], list[list[jax.Array]]],
    exponents: list[jax.Array],
    dots: jax.Array,
    dtypes: list[Any],
    anyone: jax.Array,
    context: _Context,
) -> list[list[jax.Array]]:
    """Return the rows of the next round's nodes: float32, but the last node has the leaves' dtypes."""

    @jax.jit  # traced once for the three who ask
    def compute() -> list[list[jax.Array]]:
        nodes = [_Node(*node) for node in zip(rows(), exponents, strict=True)]
        found = [
            _combine_pair(nodes[2 * i], nodes[2 * i + 1], dots[i], context) for i in range(len(nodes) // 2)
        ]
        found += [list(node.stacks) for node in nodes[2 * len(found) :]]
        last = len(found) == 1
        return [[x.astype(t) if last else x for x, t in zip(node, dtypes, strict=True)] for node in found]

    zeros = jax.eval_shape(compute)

    def nothing() -> list[list[jax.Array]]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)

    # a branch of its own: XLA on CPU would repeat the arithmetic for each reader, and element by element
    # where that is a concatenation
    return lax.platform_dependent(cpu=lambda: lax.cond(anyone, compute, nothing), default=compute)


def _scale(node: _Node, i: int, context: _Context) -> jax.Array:
    """Return a stack in float32, scaled so that its greatest element is about 1; zeros without examples."""
    exponents = context.select_stack_units(i, node.exponents)
    x = node.stacks[i].astype(jnp.float32)
    return jnp.where(exponents == ABSENT, 0, x * power(-exponents))


def _compute_dots(a: _Node, b: _Node, context: _Context) -> jax.Array:
    """Return a.b, |a|^2 and |b|^2 of this rank's rows, both scaled: (3, L)."""
    found = []
    for i in range(len(a.stacks)):
        x, y = _scale(a, i, context), _scale(b, i, context)
        found.append(jnp.stack(sum_blocks((x * y, x * x, y * y))))
    return context.per_leaf(found)


def _combine_pair(a: _Node, b: _Node, dots: jax.Array, context: _Context) -> list[jax.Array]:
    """Return the adaptive sum of two nodes, in float32. `dots` (3, units) are of the scaled vectors.

    With s the greater of the scales sa and sb, in scaled vectors:
    [sa/s - (a.b / 2|a|^2) sb/s] a + [sb/s - (a.b / 2|b|^2) sa/s] b, times s.
    """
    both, of_a, of_b = dots
    exponents = jnp.maximum(a.exponents, b.exponents)
    weight_a, weight_b = power(a.exponents - exponents), power(b.exponents - exponents)
    # a zero vector has no direction, and changes nothing of the other; NaN is not hidden
    share_a = weight_a - jnp.where(of_a < TINY, 0, both / (2 * jnp.maximum(of_a, TINY)) * weight_b)
    share_b = weight_b - jnp.where(of_b < TINY, 0, both / (2 * jnp.maximum(of_b, TINY)) * weight_a)
    stacks = []
    for i in range(len(a.stacks)):
        x = _scale(a, i, context) * context.select_stack_units(i, share_a)
        y = _scale(b, i, context) * context.select_stack_units(i, share_b)
        stacks.append((x + y) * power(context.select_stack_units(i, exponents)))
    return stacks


def _measure_orthogonality(
    stacks: Sequence[jax.Array], scale: jax.Array, squares: jax.Array, context: _Context
) -> jax.Array:
    """Return ||result||^2 / sum_r ||g_r||^2 of each leaf's unit: (L,)."""
    scaled = [_scale(_Node(stacks, scale), i, context) for i in range(len(stacks))]
    shards = context.per_leaf([sum_blocks((x * x,))[0][None] for x in scaled])[0]
    result, total = context.group.all_reduce(jnp.stack([context.units.sum(context.whole(shards)), squares]))
    ratio = jnp.where(total < TINY, 1, result / jnp.maximum(total, TINY))
    return ratio[jnp.array(context.units.of_leaf)]
