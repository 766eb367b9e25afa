"""Random keys whose draws depend on the row of the batch, not on the device that computes it.

A draw whose first dim is the batch gives row r the numbers of global row `first_row + r`, so a
dropout mask is the same for any mesh, number of microbatches or batch shard.
"""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl


def step_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Return the key of one step, which depends on the seed and the step counter only."""
    return jax.random.fold_in(jax.random.key(seed), step)


def evaluation_key(number: jax.Array | int) -> jax.Array:
    """Return the key of a held-out batch, by its number: the same in every evaluation of a run."""
    return jax.random.fold_in(jax.random.key(0), number)


def row_key(key: jax.Array, first_row: jax.Array | int, num_rows: int) -> jax.Array:
    """Return a key for the rows `first_row .. first_row + num_rows - 1` of a batch.

    Args:
      key: an ordinary typed key (threefry).
      first_row: uint32 scalar, global index of the first of these rows.
      num_rows: number of rows in a computation with this key.

    Returns:
      A typed key. Draws of shape `(num_rows, ...)` use a key per global row; draws of any other leading
      size do not depend on the row. `split` and `fold_in` keep the rows. A function that splits a key per
      row itself (`gamma`, `beta`, `dirichlet`, a vmap over keys) therefore gets the same numbers in each
      block of rows: draw `(num_rows, ...)` instead.
    """
    data = jnp.append(jax.random.key_data(key), jnp.asarray(first_row, jnp.uint32))
    return jax.random.wrap_key_data(data, impl=_row_impl(num_rows))  # type: ignore[arg-type]


@functools.cache
def _row_impl(num_rows: int) -> Hashable:
    # a key has three words: those of threefry, and the number of the first row
    def with_row(keys: jax.Array, row: jax.Array) -> jax.Array:
        data = jax.random.key_data(keys)
        return jnp.concatenate([data, jnp.broadcast_to(row, (*data.shape[:-1], 1))], -1)

    def base(data: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(data[:-1])

    def seed(number: jax.Array) -> jax.Array:
        return with_row(jax.random.key(number), jnp.uint32(0))

    def split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return with_row(jax.random.split(base(data), shape), data[-1])

    def fold_in(data: jax.Array, number: jax.Array | int) -> jax.Array:
        return with_row(jax.random.fold_in(base(data), number), data[-1])

    # where the first dim is the rows of the batch, each row draws from the key of its number in the batch
    def random_bits(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        dtype = jnp.dtype(f"uint{bit_width}")
        if not shape or shape[0] != num_rows:
            return jax.random.bits(base(data), shape, dtype)
        rows = data[-1] + jnp.arange(num_rows, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(base(data), rows)
        return jax.vmap(lambda key: jax.random.bits(key, shape[1:], dtype))(keys)

    return define_prng_impl(
        key_shape=(3,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"rows{num_rows}",
    )
