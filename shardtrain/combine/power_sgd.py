"""A codec that sends each matrix as two low-rank factors (PowerSGD, Vogels et al. 2019).

Next: `codec.py` (error feedback).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.combine.codec import (
    Encoding,
    Feedback,
    Leaves,
    add_residual,
    all_finite,
    gathered,
    make_zero_residual,
    select,
)
from shardtrain.combine.combiner import Codec, Combined, Combiner, flatten
from shardtrain.combine.group import Group
from shardtrain.functional.rng import new_key

TINY = float(jnp.finfo(jnp.float32).tiny)


class Factors(NamedTuple):
    """The factors of a (rows, columns) matrix: left (rows, rank) times right (columns, rank) transposed."""

    left: jax.Array
    right: jax.Array


def power_sgd(rank: int = 4) -> Codec:
    """Send each leaf of two or more dims as factors of low rank, by one power iteration per round.

    The dims after the first are flattened. Leaves whose factors would not be smaller are sent unchanged. The
    next round starts from the right factors of this one. Before `mean` and `sum` these are equal on all
    ranks, so they change even on a rank without examples. Each device factors its own shard of a leaf.

    Before `mean` and `sum` these are called twice, on the left factors (with the leaves that are not
    factored) and on the right ones: a ring sends 2 n' (P - 1) / P bytes per rank, n' = 4 rank (rows +
    columns) bytes per matrix. Before any other combiner each rank factors its own leaves, and all ranks
    gather all payloads of n' bytes and 4 for the count.

    Args:
      rank: the rank of the factors, 1 or more.

    Raises:
      ValueError: the rank is no whole number above 0.

    Source: Vogels et al. 2019, PowerSGD, algorithm 1 (compression) and 2 (error feedback).
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"power_sgd rank is {rank!r}; it must be a whole number above 0, such as 4")
    encoding = Encoding(init=partial(_start, rank), encode=partial(_encode, rank), decode=_decode)

    def codec(inner: Combiner) -> Combiner:
        return _make_factored(rank, inner) if inner.linear else gathered(encoding)(inner)

    return codec


def find_matrix_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return (rows, columns) of a leaf that is factored, None where factors are not smaller.

    >>> find_matrix_shape((64, 8, 8), 4), find_matrix_shape((64,), 4), find_matrix_shape((4, 4), 4)
    ((64, 64), None, None)
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if rank * (rows + columns) < rows * columns else None


def _make_factored(rank: int, inner: Combiner) -> Combiner:
    """Wrap a linear combiner, which combines the left factors first, then the right ones (algorithm 1)."""

    def init(tree: Any) -> Feedback:
        leaves = jax.tree.leaves(tree)
        return Feedback(make_zero_residual(leaves), _start(rank, leaves), ())

    def combine(tree: Any, count: Any, state: Feedback, group: Group) -> Combined:
        leaves, structure = flatten(tree)
        count = jnp.asarray(count, jnp.float32)
        target = add_residual(leaves, state.residual, count)

        # left = matrix @ right of the last round, combined over all ranks, then made orthonormal;
        # leaves that are not factored (q is None) are combined here, whole
        matrices = [_make_matrix(x, q) for x, q in zip(target, state.codec, strict=True)]
        left = [x if q is None else _matmul(x, q) for x, q in zip(matrices, state.codec, strict=True)]
        left = inner.combine(left, count, (), group).value
        left = [x if q is None else orthonormalise(x) for x, q in zip(left, state.codec, strict=True)]

        # right = matrix transposed @ left, combined over all ranks
        own = [
            None if q is None else _matmul(m.T, p)
            for m, p, q in zip(matrices, left, state.codec, strict=True)
        ]
        right = inner.combine(own, count, (), group).value

        # this rank sent its own right factors; the value is of the combined ones
        sent = _decode([_make_payload(x, own_q) for x, own_q in zip(left, own, strict=True)], target)
        found = _decode([_make_payload(x, q) for x, q in zip(left, right, strict=True)], target)
        value = jax.tree.unflatten(
            structure, [x.astype(leaf.dtype) for x, leaf in zip(found, leaves, strict=True)]
        )
        residual = [
            r if q is None else t - s
            for t, s, r, q in zip(target, sent, state.residual, state.codec, strict=True)
        ]
        next_right = [_next(q, old) for q, old in zip(right, state.codec, strict=True)]

        # the right factors stay equal on all ranks, so they change on those without examples too
        is_finite = all_finite(value, group)
        residual = select((count != 0) & is_finite, residual, state.residual)
        return Combined(value, Feedback(residual, select(is_finite, next_right, state.codec), ()))

    return Combiner(init, combine)


def _start(rank: int, leaves: Sequence[Any]) -> list[Any]:
    """Return random right factors, the same on all ranks; None for leaves that are not factored."""
    found = []
    for i, leaf in enumerate(leaves):
        shape = find_matrix_shape(leaf.shape, rank)
        key = jax.random.fold_in(new_key(0), i)
        found.append(None if shape is None else orthonormalise(jax.random.normal(key, (shape[1], rank))))
    return found


def _encode(rank: int, leaves: Leaves, state: list[Any], group: Group) -> tuple[Any, Any]:
    payload: list[Any] = []
    for leaf, q in zip(leaves, state, strict=True):
        if q is None:
            payload.append(leaf)
            continue
        matrix = _make_matrix(leaf, q)
        left = orthonormalise(_matmul(matrix, q))
        payload.append(Factors(left, _matmul(matrix.T, left)))
    right = [x.right if isinstance(x, Factors) else None for x in payload]
    return payload, [_next(q, old) for q, old in zip(right, state, strict=True)]


def _decode(payload: Any, shapes: Sequence[Any]) -> Leaves:
    return [
        (_matmul(x.left, x.right.T) if isinstance(x, Factors) else x).reshape(shape.shape)
        for x, shape in zip(payload, shapes, strict=True)
    ]


def _make_payload(left: jax.Array, right: jax.Array | None) -> Any:
    return left if right is None else Factors(left, right)


def _make_matrix(leaf: jax.Array, q: jax.Array | None) -> jax.Array:
    return leaf if q is None else leaf.reshape(leaf.shape[0], -1)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")


def _next(right: jax.Array | None, old: jax.Array | None) -> jax.Array | None:
    """Return the right factors that the next round starts from.

    A zero column is replaced by its old value, or it would stay zero for ever.
    """
    if right is None or old is None:
        return None
    greatest = jnp.max(jnp.abs(right), axis=0)
    scaled = right / jnp.where(greatest < TINY, 1, greatest)
    return jnp.where(greatest < TINY, old, scaled)


def orthonormalise(x: jax.Array) -> jax.Array:
    """Orthonormalise the columns of x (rows, rank) by modified Gram-Schmidt.

    A column that is linearly dependent on those before it becomes zero, or rounding noise orthogonal to them.

    >>> orthonormalise(jnp.array([[2.0, 1.0], [0.0, 3.0]])).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    columns: list[jax.Array] = []
    for i in range(x.shape[1]):
        column = _normalise(x[:, i])
        for _ in range(2):  # twice, as rounding leaves a remainder the first time
            for earlier in columns:
                column = column - jnp.sum(earlier * column) * earlier
            column = _normalise(column)
        columns.append(column)
    return jnp.stack(columns, axis=1)


def _normalise(x: jax.Array) -> jax.Array:
    greatest = jnp.max(jnp.abs(x), initial=0)
    x = x / jnp.where(greatest < TINY, 1, greatest)
    length = jnp.sqrt(jnp.sum(x * x))
    return x / jnp.where(length == 0, 1, length)
