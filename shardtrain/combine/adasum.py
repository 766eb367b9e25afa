"""Adasum: adds what ranks do not share, averages what they do (Maleki et al. 2021; Horovod's).

By vector halving and distance doubling for any number of ranks: what an all-reduce sends, plus scalars.
Next: `slices.py` (how leaves are cut), `exponents.py` (what keeps dot products in range).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.combine.combiner import Combined, Combiner, contribution, flatten
from shardtrain.combine.exponents import LEAST, exponent, power
from shardtrain.combine.group import Group
from shardtrain.combine.slices import Owners, block_sources, cut, in_order, join, part, split, uncut

Per = str | Callable[[str], str]
Stacks = Sequence[jax.Array]

TINY = float(jnp.finfo(jnp.float32).tiny)
ABSENT = -1000  # the exponent of a rank without examples
BLOCK = 512  # elements of one float32 partial sum: long sums lose digits


def adasum(per: Per = "leaf") -> Combiner:
    """The adaptive sum of the ranks' gradients or deltas, by a tree of consecutive pairs.

    A pair makes (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: a + b where they are orthogonal, their
    mean where they are parallel. The odd rank of a round waits for the next. A rank's count does not
    weigh it, but with count 0 it is neutral. Slices are each computed once, and given to the
    others: the result has the same bits on all ranks. One rank alone keeps its tree.

    Bytes sent per rank for n bytes of leaves, L of them, on P = 2^m odd ranks: 2 n (P - 1) / P in messages,
    besides one all-gather of 4 L bytes, per level one all-reduce of 12 L bytes (the last level, of radix
    `odd`, has one in each round of its tree, of 12 L bytes per pair), and one of 8 L at the end.

    Numbers: leaves of 16 bits cross as such, and are rounded to their dtype after each level; all arithmetic
    is float32. Each rank's leaf is scaled by a power of two for the dot products, so that any
    normal magnitude works; what is 2^-124 of its leaf's greatest element may be flushed to zero, and a
    sum that cancels to below 1e-19 of the pair that made it counts as zero.

    Args:
      per: whose dot products decide: "leaf", "whole" (all leaves as one vector), or a function from a
        leaf's path, such as "blocks/up", to the name of its group.

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
        values, orthogonality = _adasum(leaves, count, _units(tree, per), group)
        return Combined(jax.tree.unflatten(structure, values), state, {"orthogonality": orthogonality})

    return Combiner(lambda tree: (), combine, across_leaves=per != "leaf")


def levels(size: int) -> list[tuple[int, int]]:
    """(radix, distance) of each level: twos, then what is odd.

    >>> levels(8), levels(12), levels(1)
    ([(2, 1), (2, 2), (2, 4)], [(2, 1), (2, 2), (3, 4)], [])
    """
    found, distance = [], 1
    while size // distance % 2 == 0:
        found.append((2, distance))
        distance *= 2
    return found + [(size // distance, distance)] * (size > distance)


class _Units(NamedTuple):
    """What shares coefficients: `of_leaf[i]` is the number of leaf i's unit, numbered as they come."""

    of_leaf: tuple[int, ...]
    number: int

    def sum(self, x: jax.Array) -> jax.Array:
        """(..., L) to (..., units)."""
        if self.number == len(self.of_leaf):
            return x
        return jnp.zeros((*x.shape[:-1], self.number)).at[..., jnp.array(self.of_leaf)].add(x)

    def max(self, x: jax.Array) -> jax.Array:
        """Exponents (L,) to (units,)."""
        if self.number == len(self.of_leaf):
            return x
        return jnp.full(self.number, ABSENT, jnp.int32).at[jnp.array(self.of_leaf)].max(x)


def _units(tree: Any, per: Per) -> _Units:
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree.leaves_with_path(tree)]
    if callable(per):
        names = [per(path) for path in paths]
    else:
        names = [str(i) if per == "leaf" else "" for i in range(len(paths))]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return _Units(tuple(numbers[name] for name in names), len(numbers))


class _Node(NamedTuple):
    """A node of the tree: this rank's rows of each stack, and the exponents of its units."""

    stacks: Sequence[jax.Array]
    exponents: jax.Array


class _Work(NamedTuple):
    """What stays the same on the way: the leaves of each stack, the units, the group."""

    owners: Owners
    units: _Units
    group: Group

    def per_leaf(self, of_stacks: Sequence[jax.Array]) -> jax.Array:
        """Values (k, pieces) of each stack, added up: (k, L)."""
        flat = jnp.concatenate(of_stacks, axis=1)
        owners = jnp.array([owner for of_stack in self.owners for owner in of_stack])
        return jnp.zeros((flat.shape[0], len(self.units.of_leaf))).at[:, owners].add(flat)

    def of_stack(self, i: int, x: jax.Array) -> jax.Array:
        """The entries of a vector of units for stack i: (pieces, 1)."""
        return x[jnp.array([self.units.of_leaf[owner] for owner in self.owners[i]])][:, None]


def _adasum(
    leaves: list[jax.Array], count: jax.Array, units: _Units, group: Group
) -> tuple[list[jax.Array], jax.Array]:
    """The combined leaves, and the orthogonality of each."""
    stacks, owners = cut(leaves, group.size)
    if group.size == 1 or not stacks:
        return [contribution(leaf, count) for leaf in leaves], jnp.ones(len(leaves))
    work = _Work(owners, units, group)
    own = _exponents(stacks, work)
    # marked, not zeroed: a pass over all elements less
    exponents = group.all_gather(jnp.where(count != 0, own, ABSENT))
    squares = jnp.zeros(units.number)
    for radix, distance in levels(group.size):
        blocks = exponents.reshape(-1, distance, units.number).max(1)
        first = group.index // (distance * radix) * radix
        heard = _scatter(stacks, radix, distance, group)
        level = _Level(
            rows=partial(_in_order, stacks, heard, radix, distance, group),
            exponents=[lax.dynamic_index_in_dim(blocks, first + i, keepdims=False) for i in range(radix)],
            span=distance * radix,
            anyone=exponents.max() != ABSENT,
        )
        stacks, norms = _tree(level, [x.dtype for x in stacks], work)
        if distance == 1:
            squares = lax.dynamic_index_in_dim(norms, group.index % radix, keepdims=False)
    scale = jnp.maximum(exponents.max(0), LEAST)
    orthogonality = _orthogonality(stacks, scale, squares * power(2 * (own - scale)), work)
    return uncut(_gather(stacks, group), owners, leaves), orthogonality


def _exponents(stacks: Sequence[jax.Array], work: _Work) -> jax.Array:
    """The exponent of each unit's greatest element: (units,)."""
    leaves = jnp.full(len(work.units.of_leaf), LEAST, jnp.int32)
    for stack, owners in zip(stacks, work.owners, strict=True):
        leaves = leaves.at[jnp.array(owners)].max(exponent(stack, axis=(0, 2)))
    return work.units.max(work.group.whole(leaves, "max"))


def _scatter(stacks: Stacks, radix: int, distance: int, group: Group) -> list[list[jax.Array]]:
    """The messages that this rank hears in each turn, with its part of the rows of its partners."""
    position = group.index // distance % radix
    heard = []
    for turn in range(1, radix):
        sources = block_sources(group.size, distance, radix, turn)
        given = join([part(x, (position - turn) % radix, radix) for x in stacks])
        heard.append([group.exchange(message, sources) for message in given])
    return heard


def _in_order(
    stacks: Stacks, heard: list[list[jax.Array]], radix: int, distance: int, group: Group
) -> list[list[jax.Array]]:
    """This rank's part of the rows of each rank of its block, ordered by the position of that rank."""
    position = group.index // distance % radix
    own = [part(x, position, radix) for x in stacks]
    turns = [own, *(split(messages, own) for messages in heard)]
    by_stack = [in_order(of_stack, position) for of_stack in zip(*turns, strict=True)]
    return [list(rows) for rows in zip(*by_stack, strict=True)]


def _gather(stacks: Stacks, group: Group) -> list[list[jax.Array]]:
    """The rows that all ranks hold, by the way back: for each stack blocks of rows, in order."""
    blocks = [[message] for message in join(stacks)]
    for radix, distance in reversed(levels(group.size)):
        blocks = [_block_rows(rows, radix, distance, group) for rows in blocks]
    by_block = [split(rows, stacks) for rows in zip(*blocks, strict=True)]
    return [list(rows) for rows in zip(*by_block, strict=True)]


def _block_rows(rows: list[jax.Array], radix: int, distance: int, group: Group) -> list[jax.Array]:
    """This rank's consecutive blocks of rows, and those of its partners, in order."""
    position = group.index // distance % radix
    turns = [rows[0] if len(rows) == 1 else jnp.concatenate(rows)]
    for turn in range(1, radix):
        turns.append(group.exchange(turns[0], block_sources(group.size, distance, radix, turn)))
    ordered = in_order(turns, position)
    if isinstance(position, int):  # its own are in pieces still: they need not be put together yet
        return [*ordered[:position], *rows, *ordered[position + 1 :]]
    return ordered


class _Level(NamedTuple):
    """The nodes of a level: `rows()` of each, made anew by each reader so that slices are never copied."""

    rows: Callable[[], list[list[jax.Array]]]
    exponents: list[jax.Array]
    span: int
    anyone: jax.Array


def _tree(level: _Level, dtypes: list[Any], work: _Work) -> tuple[list[jax.Array], jax.Array]:
    """The nodes of one level by consecutive pairs; also the squared norms of each node, (radix, units)."""
    rows, exponents = level.rows, level.exponents
    norms: list[Any] = [None] * len(exponents)
    known: list[int | None] = list(range(len(exponents)))
    while len(exponents) > 1:
        nodes = [_Node(*node) for node in zip(rows(), exponents, strict=True)]
        num_pairs = len(nodes) // 2
        pairs = [(nodes[2 * i], nodes[2 * i + 1]) for i in range(num_pairs)]
        shards = work.group.whole(jnp.stack([_dots(a, b, work) for a, b in pairs]))
        dots = work.group.all_reduce(work.units.sum(shards), level.span)
        for i, node in enumerate(known[: 2 * num_pairs]):
            if node is not None:
                norms[node] = dots[i // 2, 1 + i % 2]
        known = [None] * num_pairs + known[2 * num_pairs :]
        rows = partial(list, _round(rows, exponents, dots, dtypes, level.anyone, work))
        exponents = [jnp.maximum(a.exponents, b.exponents) for a, b in pairs] + exponents[2 * num_pairs :]
    return rows()[0], jnp.stack(norms)


def _round(
    rows: Callable[[], list[list[jax.Array]]],
    exponents: list[jax.Array],
    dots: jax.Array,
    dtypes: list[Any],
    anyone: jax.Array,
    work: _Work,
) -> list[list[jax.Array]]:
    """The rows of the next round's nodes; float32, but of the last node, which has the leaves' dtypes."""

    def compute() -> list[list[jax.Array]]:
        nodes = [_Node(*node) for node in zip(rows(), exponents, strict=True)]
        found = [_pair(nodes[2 * i], nodes[2 * i + 1], dots[i], work) for i in range(len(nodes) // 2)]
        found += [list(node.stacks) for node in nodes[2 * len(found) :]]
        last = len(found) == 1
        return [[x.astype(t) if last else x for x, t in zip(node, dtypes, strict=True)] for node in found]

    zeros = jax.eval_shape(compute)

    def nothing() -> list[list[jax.Array]]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)

    # a branch of its own: XLA on CPU would repeat the arithmetic for each reader, and element by element
    # where that is a concatenation
    return lax.platform_dependent(cpu=lambda: lax.cond(anyone, compute, nothing), default=compute)


def _scaled(node: _Node, i: int, work: _Work) -> jax.Array:
    """A stack in float32, its greatest element about 1; zeros from ranks without examples."""
    exponents = work.of_stack(i, node.exponents)
    x = node.stacks[i].astype(jnp.float32)
    return jnp.where(exponents == ABSENT, 0, x * power(-exponents))


def _dots(a: _Node, b: _Node, work: _Work) -> jax.Array:
    """a.b, |a|^2 and |b|^2 of the rows held here, both scaled: (3, L)."""
    found = []
    for i in range(len(a.stacks)):
        x, y = _scaled(a, i, work), _scaled(b, i, work)
        found.append(jnp.stack(_sums((x * y, x * x, y * y))))
    return work.per_leaf(found)


def _pair(a: _Node, b: _Node, dots: jax.Array, work: _Work) -> list[jax.Array]:
    """The sum of two nodes, in float32. `dots` (3, units) are of the scaled vectors.

    With s the greater of the scales sa and sb, in scaled vectors:
    [sa/s - (a.b / 2|a|^2) sb/s] a + [sb/s - (a.b / 2|b|^2) sa/s] b, times s.
    """
    both, of_a, of_b = dots
    exponents = jnp.maximum(a.exponents, b.exponents)
    weight_a, weight_b = power(a.exponents - exponents), power(b.exponents - exponents)
    # a zero vector has no direction, and takes nothing from the other; NaN goes through
    share_a = weight_a - jnp.where(of_a < TINY, 0, both / (2 * jnp.maximum(of_a, TINY)) * weight_b)
    share_b = weight_b - jnp.where(of_b < TINY, 0, both / (2 * jnp.maximum(of_b, TINY)) * weight_a)
    stacks = []
    for i in range(len(a.stacks)):
        x = _scaled(a, i, work) * work.of_stack(i, share_a)
        y = _scaled(b, i, work) * work.of_stack(i, share_b)
        stacks.append((x + y) * power(work.of_stack(i, exponents)))
    return stacks


def _orthogonality(
    stacks: Sequence[jax.Array], scale: jax.Array, squares: jax.Array, work: _Work
) -> jax.Array:
    """||result||^2 / sum_r ||g_r||^2 of each leaf's unit, from this rank's rows and its own square: (L,)."""
    scaled = [_scaled(_Node(stacks, scale), i, work) for i in range(len(stacks))]
    shards = work.per_leaf([_sums((x * x,))[0][None] for x in scaled])[0]
    result, total = work.group.all_reduce(jnp.stack([work.units.sum(work.group.whole(shards)), squares]))
    ratio = jnp.where(total < TINY, 1, result / jnp.maximum(total, TINY))
    return ratio[jnp.array(work.units.of_leaf)]


def _sums(terms: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The sums (pieces,) of arrays (rows, pieces, width), all in one pass.

    By blocks, for a long float32 sum loses digits.
    """
    if terms[0].shape[-1] <= BLOCK:
        return [x.sum(0) for x in _sum_last(terms)]
    width = terms[0].shape[-1] // BLOCK * BLOCK
    blocks = tuple(x[..., :width].reshape(*x.shape[:-1], -1, BLOCK) for x in terms)
    rest = _sum_last(tuple(x[..., width:] for x in terms))
    return [x + y.sum(0) for x, y in zip(_sums(_sum_last(blocks)), rest, strict=True)]


def _sum_last(terms: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Sums over the last dim; as one reduction XLA reads what they share once."""

    def add(x: Any, y: Any) -> Any:
        return tuple(p + q for p, q in zip(x, y, strict=True))

    return tuple(lax.reduce(terms, tuple(jnp.float32(0) for _ in terms), add, (terms[0].ndim - 1,)))
