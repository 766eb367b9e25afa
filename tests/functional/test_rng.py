"""Row keys: a draw depends on the global row, not on how rows are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.functional.rng import row_key, step_key

ROWS, WIDTH = 12, 3

DRAWS = {
    "bernoulli": lambda key, rows: jax.random.bernoulli(key, 0.3, (rows, WIDTH)),
    "normal": lambda key, rows: jax.random.normal(key, (rows, 2, WIDTH)),
    "uniform": lambda key, rows: jax.random.uniform(key, (rows,)),
    "bfloat16": lambda key, rows: jax.random.normal(key, (rows, WIDTH), jnp.bfloat16),
    "randint": lambda key, rows: jax.random.randint(key, (rows, WIDTH), 0, 1000),
    "uint8": lambda key, rows: jax.random.bits(key, (rows, WIDTH), jnp.uint8),
    "after both": lambda key, rows: jax.random.uniform(
        jax.random.fold_in(jax.random.split(jax.random.fold_in(key, 1))[1], 2), (rows, WIDTH)
    ),
}


@functools.cache
def drawn(name, num_rows):
    """(seed, first row) -> the numbers of so many rows; compiled once for each count."""
    draw = DRAWS[name]
    return jax.jit(lambda seed, first: draw(row_key(step_key(seed, jnp.int32(5)), first, num_rows), num_rows))


def whole(name, seed=0):
    return np.asarray(drawn(name, ROWS)(seed, 0))


@pytest.mark.parametrize("name", DRAWS)
def test_blocks_of_rows_draw_as_the_whole_batch(name):
    blocks = [drawn(name, 4)(0, first) for first in (0, 4, 8)]
    np.testing.assert_array_equal(np.concatenate(blocks), whole(name))
    assert len(np.unique(whole(name).astype(np.float32), axis=0)) > 1


def test_rows_beyond_32_bits_and_large_seeds():
    for seed, offset in ((2**32 - 1, 1), (3, 2**32 - ROWS)):
        seed, blocks = np.uint32(seed), [np.uint32(first + offset) for first in (0, 4, 8)]
        found = [drawn("uniform", 4)(seed, first) for first in blocks]
        np.testing.assert_array_equal(np.concatenate(found), drawn("uniform", ROWS)(seed, blocks[0]))


def test_other_leading_sizes_are_shared_by_all_rows():
    key, shape = jax.random.key(0), (WIDTH, ROWS)
    draws = [jax.random.uniform(row_key(key, first, 4), shape) for first in (0, 4, 8)]
    plain = jax.random.uniform(key, shape)
    for draw in draws:
        np.testing.assert_array_equal(draw, plain)


def test_split_and_fold_in_of_many():
    """Stacked keys, as those of scanned layers, keep their row too, and differ among themselves."""
    key = row_key(jax.random.key(0), 4, 4)
    assert jax.random.split(key, (2, 3)).shape == (2, 3)
    draws = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(jax.random.split(key, 5))
    rows = jax.vmap(lambda key: jax.random.uniform(key, (12,)))(
        jax.random.split(row_key(jax.random.key(0), 0, 12), 5)
    )
    np.testing.assert_array_equal(draws, rows[:, 4:8])
    assert len(np.unique(draws)) == 20


def test_seeds_steps_rows_and_folds_differ():
    def row(seed, step, first, fold):
        key = row_key(step_key(jnp.uint32(seed), jnp.int32(step)), first, 1)
        return jax.random.uniform(jax.random.fold_in(key, fold), (1,))

    cases = [(s, t, r, f) for s in (0, 1, 2**32 - 1) for t in (0, 1, 2) for r in (0, 1) for f in (0, 1)]
    draws = jax.jit(jax.vmap(row))(*map(jnp.uint32, zip(*cases, strict=True)))
    assert len(np.unique(draws)) == len(cases)
    again = jax.jit(jax.vmap(row))(*map(jnp.uint32, zip(*cases, strict=True)))
    np.testing.assert_array_equal(draws, again)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
def test_bits_of_each_width(dtype):
    bits = np.asarray(jax.random.bits(row_key(jax.random.key(0), 0, 64), (64, 64), dtype))
    assert bits.dtype == dtype
    ones = np.unpackbits(bits.view(np.uint8)).reshape(-1, 8 * bits.itemsize).mean(0)
    assert abs(ones - 0.5).max() < 0.05  # 4096 draws of each bit: more than 6 standard deviations


def test_rows_are_uniform_and_independent():
    rows, width = 64, 1024
    numbers = np.asarray(jax.random.uniform(row_key(jax.random.key(1), 0, rows), (rows, width)))
    assert abs(numbers.mean(1) - 0.5).max() < 6 * np.sqrt(1 / 12 / width)
    counts, _ = np.histogram(numbers, 16, (0, 1))
    assert abs(counts - numbers.size / 16).max() < 6 * np.sqrt(numbers.size / 16)
    between_rows = np.corrcoef(numbers) - np.eye(rows)
    between_places = np.corrcoef(numbers.T[:rows]) - np.eye(rows)
    assert abs(between_rows).max() < 6 / np.sqrt(width)
    assert abs(between_places).max() < 6 / np.sqrt(rows)
    assert len(np.unique(numbers.round(6))) > 0.9 * numbers.size


def test_keys_do_not_depend_on_the_default_of_jax():
    def numbers():
        key = step_key(jnp.uint32(3), jnp.int32(1))
        return np.asarray(jax.random.uniform(row_key(jax.random.split(key)[0], 4, 2), (2, 3)))

    expected = numbers()
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(numbers(), expected)
