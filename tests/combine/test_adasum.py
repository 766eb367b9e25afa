"""Adasum against a float64 tree, its laws, and its numbers at the ends of float32's range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.combine import MeshGroup, adasum


def combined(group, *leaves):
    found = adasum().combine(list(leaves), 1.0, (), group)
    return found.value, found.metrics["orthogonality"]


@functools.cache
def on_vmap(size):
    return jax.jit(jax.vmap(functools.partial(combined, MeshGroup("data", size)), axis_name="data"))


def one_leaf(vectors):
    """Adasum of a (ranks, n) array, and its orthogonality."""
    x = jnp.asarray(vectors, jnp.float32)
    (value,), orthogonality = on_vmap(x.shape[0])(x)
    assert (np.asarray(value) == np.asarray(value)[:1]).all()
    return np.asarray(value[0], np.float64), float(orthogonality[0, 0])


NUMBERS = st.floats(-8, 8, width=32)
VECTOR = st.lists(NUMBERS, min_size=6, max_size=6).map(np.array)


def vectors(count):
    return st.lists(VECTOR, min_size=count, max_size=count).map(np.array)


@settings(deadline=None, max_examples=40)
@given(st.lists(NUMBERS, min_size=6, max_size=6))
def test_orthogonal_vectors_are_added(entries):
    ranks = np.zeros((4, 6))
    for i, entry in enumerate(entries):
        ranks[i % 4, i] = entry
    value, orthogonality = one_leaf(ranks)
    np.testing.assert_allclose(value, ranks.sum(0), rtol=1e-5, atol=1e-30)
    assert orthogonality == pytest.approx(1, rel=1e-5)


@settings(deadline=None, max_examples=40)
@given(VECTOR.filter(lambda v: np.abs(v).max() > 1e-3), st.integers(-30, 18))
def test_equal_vectors_are_averaged_at_any_scale(vector, exponent):
    vector = vector * 10.0**exponent
    value, orthogonality = one_leaf(np.stack([vector] * 4))
    # what is 1e-38, or 1e-37 of the greatest, is flushed to zero
    atol = 2e-38 + 1e-36 * np.abs(vector).max()
    np.testing.assert_allclose(value, vector.astype(np.float32), rtol=1e-5, atol=atol)
    assert orthogonality == pytest.approx(0.25, rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(vectors(3), st.integers(-60, 60))
def test_joint_scaling_scales_the_result(ranks, exponent):
    # by a power of two, so that every rounding is the same
    ranks = np.round(ranks * 64) / 64
    value, orthogonality = one_leaf(ranks)
    scaled, same = one_leaf(ranks * 2.0**exponent)
    np.testing.assert_allclose(scaled, value * 2.0**exponent, rtol=1e-6, atol=0)
    assert same == orthogonality


@pytest.mark.parametrize("scale", [1e-20, 1e-37, 1.8e19, np.finfo(np.float32).max / 4])
def test_parallel_vectors_average_at_the_ends_of_the_range(scale):
    vector = np.array([1, -0.5, 0.25, 0.75, 1.0])
    # the mean of the means of pairs
    for factors, expected in (((1, 1, 1, 1), 1), ((1, 0.5, 1, 0.25), 0.6875)):
        value, _ = one_leaf(scale * np.outer(factors, vector))
        np.testing.assert_allclose(value, scale * expected * vector, rtol=1e-5, atol=2e-38)


def test_ranks_of_far_apart_magnitudes_still_average():
    vector = np.array([3.0, -1.0, 2.0])
    for small in (1e-10, 1e-25):
        value, _ = one_leaf(np.stack([vector * 1e10, vector * small]))
        np.testing.assert_allclose(value, vector * 0.5e10, rtol=1e-5)


def test_zero_and_subnormal_vectors_are_neutral():
    vector = np.array([3.0, -1.0, 2.0])
    for nothing in (0.0, 1e-40):
        value, orthogonality = one_leaf(np.stack([vector, vector * 0 + nothing]))
        np.testing.assert_array_equal(value, vector)
        assert orthogonality == pytest.approx(1)
    value, orthogonality = one_leaf(np.zeros((3, 4)))
    assert not value.any()
    assert orthogonality == 1


def test_what_cancels_to_almost_nothing_counts_as_zero():
    # the pair leaves 3e-20, whose squares are flushed to zero, but not its products with the third
    left = np.full(100_000, 1e-20)
    ranks = np.stack([left, left, np.ones(100_000)])
    ranks[:2, 0] = 1, -1
    np.testing.assert_allclose(one_leaf(ranks)[0], ranks[2], rtol=1e-6)


def test_dot_products_of_long_vectors_keep_their_digits():
    # 3 million terms: one running float32 sum is off by 1e-3
    random = np.random.default_rng(0)
    ranks = (random.normal(size=(2, 3_000_001)) + 1).astype(np.float32)
    value, orthogonality = one_leaf(ranks)
    a, b = ranks.astype(np.float64)
    expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
    np.testing.assert_allclose(value, expected, rtol=0, atol=3e-6)
    assert orthogonality == pytest.approx((expected @ expected) / (a @ a + b @ b), rel=3e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_leaves_of_16_bits_add_up_in_float32(dtype, references):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(4, 5000)) * 100, dtype)
    (value,), _ = on_vmap(4)(x)
    assert value.dtype == dtype
    expected = references.tree_of_pairs(np.asarray(x, np.float64))
    # the squares, 1e4 each, overflow float16, and 5000 of them stand still in bfloat16
    error = np.abs(np.asarray(value[0], np.float64) - expected).max()
    assert error < 3 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()


def test_what_decides_is_the_leaf_the_whole_or_a_group(references):
    random = np.random.default_rng(0)
    tree = {"a": {"x": (4, 3), "y": (5,)}, "b": (7,)}
    tree = jax.tree.map(
        lambda s: random.normal(size=(3, *s)) + 1, tree, is_leaf=lambda s: isinstance(s, tuple)
    )
    stacked = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    leaves = [[x[r] for x in jax.tree.leaves(tree)] for r in range(3)]
    group = MeshGroup("data", 3)
    cases = (("leaf", [0, 1, 2]), ("whole", [0, 0, 0]), (lambda path: path.split("/")[0], [0, 0, 1]))
    for per, units in cases:
        combiner = adasum(per)
        assert combiner.across_leaves == (per != "leaf")
        run = jax.vmap(lambda x, c=combiner: c.combine(x, 1.0, (), group)[::2], axis_name="data")
        value, metrics = jax.jit(run)(stacked)
        expected = references.adasum(leaves, [1, 1, 1], units)
        for x, y in zip(jax.tree.leaves(value), expected, strict=True):
            np.testing.assert_allclose(x[0], y, rtol=1e-5, atol=1e-5)
        for unit in set(units):
            which = [i for i, u in enumerate(units) if u == unit]
            ratio = sum((expected[i] ** 2).sum() for i in which) / sum(
                (r[i] ** 2).sum() for r in leaves for i in which
            )
            np.testing.assert_allclose(metrics["orthogonality"][0, jnp.array(which)], ratio, rtol=1e-4)
    with pytest.raises(ValueError) as error:
        adasum("leave")
    assert str(error.value) == "adasum per 'leave'; allowed: 'leaf', 'whole' or a function from path to group"


def test_a_leaf_does_not_depend_on_what_crosses_with_it():
    random = np.random.default_rng(0)
    a, b, c = (jnp.asarray(random.normal(size=(3, n)), jnp.float32) for n in (700, 13, 700))
    (alone,), _ = on_vmap(3)(a)
    (_, _, together), _ = on_vmap(3)(c, b, a)
    np.testing.assert_array_equal(alone, together)
