"""Make random keys whose draws depend on the row of the batch, not on the device that computes it.

A draw with a dim of rows gives row r the numbers of global row `first_row + r`, so a dropout mask is the
same for any mesh, number of microbatches or batch shard. Next: `checks/row_draws.py`, which finds these dims.
"""

import functools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl

THREEFRY = "threefry2x32"
"""The algorithm of all keys: with others the numbers of a row depend on the size of the batch."""

BITS, SPLIT = "draws", "splits a key into"
"""Kinds of draws: numbers, or keys; as messages name them."""


class Draw(NamedTuple):
    """A draw of a traced model, for any number of rows.

    Args:
      kind: `BITS` or `SPLIT`.
      shape: its shape for one row.
      dim: the dim that counts rows; None if the draw is the same for all rows.
      outer: number of entries of this dim before rows, as in (time, rows) flattened; the other entries
        follow rows, as in (rows, time).
      line: the file and line of the model that draws.
    """

    kind: str
    shape: tuple[int, ...]
    dim: int | None = None
    outer: int = 1
    line: str = ""

    def shape_for(self, num_rows: int) -> tuple[int, ...]:
        """Return its shape for a number of rows."""
        return tuple(size * num_rows if i == self.dim else size for i, size in enumerate(self.shape))


Draws = tuple[Draw, ...]


def new_key(seed: jax.Array | int) -> jax.Array:
    """Return a key of the package's algorithm."""
    return jax.random.key(seed, impl=THREEFRY)


def step_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Return the key of one step, which depends on the seed and the step counter only."""
    return jax.random.fold_in(new_key(seed), step)


def evaluation_key(number: jax.Array | int) -> jax.Array:
    """Return the key of a held-out batch, by its number: the same in every evaluation of a run."""
    return jax.random.fold_in(new_key(0), number)


def row_key(
    key: jax.Array, first_row: jax.Array | int, num_rows: int, draws: Draws | None = None
) -> jax.Array:
    """Return a key for the rows `first_row .. first_row + num_rows - 1` of a batch.

    Args:
      key: an ordinary typed key (threefry).
      first_row: uint32 scalar, global index of the first of these rows.
      num_rows: number of rows in a computation with this key.
      draws: the draws of the model, see `checks.row_draws.find_draws`. None means that a draw counts rows if
        its first dim has that size, and that keys are split alike for all rows.

    Returns:
      A typed key. A draw or split with a dim of rows uses a key per global row; others do not depend on the
      row. `split` and `fold_in` keep the rows.

    Raises:
      ValueError: two draws have one shape for this number of rows, but not for others.
    """
    data = jnp.append(jax.random.key_data(key), jnp.asarray(first_row, jnp.uint32))
    return jax.random.wrap_key_data(data, impl=_row_impl(num_rows, draws))  # type: ignore[arg-type]


@functools.cache
def _row_impl(num_rows: int, draws: Draws | None) -> Hashable:
    known = None if draws is None else _group_by_shape(num_rows, draws)

    # a key has three words: those of threefry, and the number of the first row
    def fold_row(keys: jax.Array, row: jax.Array) -> jax.Array:
        data = jax.random.key_data(keys)
        return jnp.concatenate([data, jnp.broadcast_to(row, (*data.shape[:-1], 1))], -1)

    def base(data: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(data[:-1], impl=THREEFRY)

    def seed(number: jax.Array) -> jax.Array:
        return fold_row(new_key(number), jnp.uint32(0))

    def fold_in(data: jax.Array, number: jax.Array | int) -> jax.Array:
        return fold_row(jax.random.fold_in(base(data), number), data[-1])

    def find_rows(kind: str, shape: tuple[int, ...]) -> Draw | None:
        """Return how a draw counts rows; None without rows."""
        if known is None:
            counts = kind == BITS and bool(shape) and shape[0] == num_rows
            return Draw(kind, (1, *shape[1:]), 0) if counts else None
        if kind == BITS and shape and (kind, shape) not in known:
            raise ValueError(
                f"a draw of shape {shape} for {num_rows} rows is none of those of the model on one device, so"
                " it is not known which rows it is for; draw with the same shapes in every layout"
            )
        return known.get((kind, shape))

    def draw_by_row(data: jax.Array, draw: Draw, function: Callable[..., jax.Array]) -> jax.Array:
        """Call a function of (key, shape) for each row, and move the rows to their dim of the draw."""
        assert draw.dim is not None
        before, size, after = draw.shape[: draw.dim], draw.shape[draw.dim], draw.shape[draw.dim + 1 :]
        rows = data[-1] + jnp.arange(num_rows, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(base(data), rows)
        of_row = (*before, draw.outer, size // draw.outer, *after)
        found = jnp.moveaxis(jax.vmap(lambda key: function(key, of_row))(keys), 0, draw.dim + 1)
        return found.reshape(draw.shape_for(num_rows))

    def split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        draw = find_rows(SPLIT, shape)
        keys = (
            jax.random.split(base(data), shape) if draw is None else draw_by_row(data, draw, jax.random.split)
        )
        return fold_row(keys, data[-1])

    def random_bits(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        dtype, draw = jnp.dtype(f"uint{bit_width}"), find_rows(BITS, shape)
        if draw is None:
            return jax.random.bits(base(data), shape, dtype)
        return draw_by_row(data, draw, functools.partial(jax.random.bits, dtype=dtype))

    return define_prng_impl(
        key_shape=(3,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"rows{num_rows}",
    )


def _group_by_shape(num_rows: int, draws: Draws) -> dict[tuple[str, tuple[int, ...]], Draw | None]:
    """Return the draw of each shape; None for draws that are the same for all rows.

    Raises:
      ValueError: two draws have one shape for this number of rows, but not for others.
    """
    found: dict[tuple[str, tuple[int, ...]], Draw] = {}
    for draw in draws:
        shape = draw.shape_for(num_rows)
        before = found.setdefault((draw.kind, shape), draw)
        if before._replace(line="") != draw._replace(line="") and math.prod(shape):
            raise ValueError(
                f"with {num_rows} rows in a microbatch of a replica, {before.line} and {draw.line} both have"
                f" a draw of shape {shape}, and rows are counted otherwise in each, so their numbers would"
                f" depend on the layout; use another number of rows (batch, accumulate, data)"
                ", or another shape for one of them"
            )
    return {key: None if draw.dim is None else draw for key, draw in found.items()}
