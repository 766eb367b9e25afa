"""The contract of combiners and codecs, held against every entry of the registry.

An entry needs nothing here: it is checked alone, and a codec before every combiner. Where conftest.py has a
reference in float64, values are compared with it too.
"""

import doctest
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.cli.run_file import load_combiner
from shardtrain.combine import CODECS, COMBINERS, make_combiner

# jaxlib 0.11.2 ends the process at an array without elements in a shard_map
EMPTY = {} if version("jaxlib") == "0.11.2" else {"none": (0,)}
SHAPES = {"matrix": (6, 5), "few": (2,), **EMPTY, "scalar": (), "short": (7,)}
NARROW = "short"
"""The leaf that is bfloat16 from the start."""
BFLOAT16_EPS = 2**-8

ARGUMENTS = {"top_k": ":0.3", "power_sgd": ":2", "scale": ":0.25,4"}
"""Arguments that fit these small leaves, and factors of which nothing is left."""

REGISTERED_CODECS = [f"{codec}{ARGUMENTS.get(codec, '')}" for codec in CODECS]
REGISTERED = [*COMBINERS, *(f"{codec}+{combiner}" for codec in REGISTERED_CODECS for combiner in COMBINERS)]
VARIANTS = ["adasum:whole", "bfloat16+int8+mean"]

TOLERANCES = {
    # relative: of float32 sums, or of 16 bits, which round what is sent and the result
    "mean": 2e-6,
    "sum": 2e-6,
    "adasum": 5e-6,
    "adasum:whole": 2e-3,  # the rounding of the leaf of 16 bits changes the one coefficient of all leaves
    "bfloat16+mean": 2**-6,
    "bfloat16+sum": 2**-6,
    "bfloat16+adasum": 2**-5,
    "float16+mean": 2**-9,
    "float16+sum": 2**-9,
    "float16+adasum": 2**-8,
    "int8+mean": 2e-5,
    "int8+sum": 5e-5,
    "int8+adasum": 1e-4,
    "top_k:0.3+mean": 1e-5,
    "top_k:0.3+sum": 3e-5,
    "top_k:0.3+adasum": 5e-5,
    "power_sgd:2+mean": 1e-4,
    "power_sgd:2+sum": 3e-4,
    "power_sgd:2+adasum": 1e-4,
    "scale:0.25,4+mean": 2e-6,
    "scale:0.25,4+sum": 2e-6,
    "scale:0.25,4+adasum": 5e-6,
    "bfloat16+int8+mean": 2**-5,
}
"""Names with a reference in float64."""


def full_of(name):
    """The marks of a case, of what runs with `--full` alone.

    A codec before a sum, all but one before Adasum, that one before a mean, and two codecs.
    """
    before_adasum = name.endswith("+adasum") and name != "float16+adasum"
    others = ("float16+mean", "bfloat16+int8+mean")
    return [pytest.mark.full] * (name.endswith("+sum") or before_adasum or name in others)


SIZES = {"mean": ("mesh", 5), "adasum": ("mesh", 5), "bfloat16+mean": ("mesh", 1), "int8+mean": ("mesh", 8)}
# any number of ranks is what test_adasum.py tries; the others have two of a mesh or three by vmap, in turn
CASES = [
    pytest.param(name, *SIZES.get(name, [("mesh", 2), ("vmap", 3)][i % 2]), marks=full_of(name))
    for i, name in enumerate([*REGISTERED, *VARIANTS])
]


def trees(size, seed):
    """Rank-stacked leaves."""
    random = np.random.default_rng(seed)
    tree = {name: random.normal(size=(size, *shape)) + 0.5 for name, shape in SHAPES.items()}
    return {k: v.astype(jnp.bfloat16 if k == NARROW else np.float32) for k, v in tree.items()}


def as_float64(tree, size):
    return [[np.asarray(x[r], np.float64) for x in jax.tree.leaves(tree)] for r in range(size)]


def check_close(found, expected, ranks, tolerance):
    for i, (name, x, y) in enumerate(zip(sorted(SHAPES), jax.tree.leaves(found), expected, strict=True)):
        if not x.size:
            continue
        scale = max(np.abs(leaves[i]).max() for leaves in ranks)
        atol = scale * (max(tolerance, 4 * BFLOAT16_EPS) if name == NARROW else tolerance)
        np.testing.assert_allclose(np.asarray(x[0], np.float64), y, rtol=0, atol=atol, err_msg=name)


def same_on_all_ranks(x):
    return bool((np.asarray(x) == np.asarray(x)[:1]).all())


def check_equal(tree, other):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def rank_of(tree, rank):
    return jax.tree.map(lambda x: x[rank], tree)


def check_rounds(combiner, ranks, kind, size, expected=None, tolerance=0.0):
    """Three rounds, then a value that is not finite, then no examples at all.

    Args:
      expected: (ranks, counts) -> the leaves in float64; None compares no values.
      tolerance: of the values.
    """
    combine = ranks.run(
        kind, lambda group, tree, count, state: combiner.combine(tree, count, state, group)[:3], size
    )
    state = ranks.state(combiner, rank_of(trees(size, 0), 0), size)
    empty = size - 2 if size > 1 else None

    # the state is carried on from round to round; in the second a rank without examples holds NaN
    for step in range(3):
        tree = trees(size, step)
        counts = np.arange(1, size + 1, dtype=np.float32) % 4 + 1
        is_empty = empty is not None and step == 1
        if is_empty:
            counts[empty] = 0
            for x in tree.values():
                x[empty] = np.nan
        value, after, metrics = jax.device_get(combine(tree, counts, state))
        for x, leaf in zip(jax.tree.leaves(value), jax.tree.leaves(tree), strict=True):
            assert (x.shape, x.dtype) == (leaf.shape, leaf.dtype)
            assert np.isfinite(np.asarray(x, np.float32)).all()
        assert all(same_on_all_ranks(x) for x in jax.tree.leaves((value, metrics)))
        assert all(x.dtype == np.float32 and np.isfinite(x).all() for x in metrics.values())
        if expected is not None:
            clean = [[np.nan_to_num(x) for x in rank] for rank in as_float64(tree, size)]
            check_close(value, expected(clean, counts), clean, tolerance)
        if is_empty:
            # its own state stays, only what all ranks have in common may change
            for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
                assert same_on_all_ranks(new) or (new[empty] == np.asarray(old)[empty]).all()
        state = after

    # a value that is not finite reaches every rank, and no state
    for bad, leaf in ((jnp.nan, "matrix"), (jnp.inf, "scalar"), (-jnp.inf, NARROW)):
        tree = trees(size, 5)
        first = (size - 1, *([0] * len(SHAPES[leaf])))
        tree[leaf][first] = bad
        value, after, _ = jax.device_get(combine(tree, np.ones(size, np.float32), state))
        for rank in range(size):
            assert not np.isfinite(np.asarray(value[leaf][rank], np.float32)).all(), (leaf, rank)
        check_equal(after, state)

    # no rank has examples
    value, after, metrics = jax.device_get(combine(tree, np.zeros(size, np.float32), state))
    assert all(not np.asarray(x, np.float32).any() for x in jax.tree.leaves(value))
    assert all(np.isfinite(x).all() for x in metrics.values())
    check_equal(after, state)


def check_flags(combiner, ranks):
    """`linear` and `across_leaves` say what is so."""
    shapes = {"a": (4, 3), "b": (5,)}
    random = np.random.default_rng(0)
    tree, other = (
        {k: jnp.asarray(random.normal(size=(2, *s)), jnp.float32) for k, s in shapes.items()}
        for _ in range(2)
    )
    assert not (combiner.linear and jax.tree.leaves(combiner.init(rank_of(tree, 0))))

    def all_values(group, tree, other, count):
        def combine(tree):
            return combiner.combine(tree, count, combiner.init(tree), group).value

        both = jax.tree.map(lambda x, y: 2 * x - y, tree, other)
        parts = {} if combiner.across_leaves else {k: combine({k: x})[k] for k, x in tree.items()}
        sums = (combine(both), combine(other)) if combiner.linear else None
        return combine(tree), parts, sums

    value, parts, sums = ranks.run("vmap", all_values, 2)(tree, other, jnp.array([1.0, 2.0]))
    for name, x in parts.items():
        np.testing.assert_allclose(x, value[name], rtol=1e-5, atol=1e-6)
    if sums is not None:
        expected = jax.tree.map(lambda x, y: 2 * x - y, value, sums[1])
        for name, x in sums[0].items():
            np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=1e-5)


def check_feedback(combiner, ranks, exact, num_rounds=64):
    """The residual of a codec is bounded: the mean over rounds approaches the exact value as 1 / rounds."""
    tree = {"matrix": jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 5)), jnp.float32)}
    counts = jnp.array([1.0, 2.0, 1.0])

    def all_rounds(group, tree, count, state):
        def step(state, _):
            found = combiner.combine(tree, count, state, group)
            return found.state, found.value["matrix"]

        return jax.lax.scan(step, state, None, length=num_rounds)[1]

    values = ranks.run("vmap", all_rounds, 3)(tree, counts, ranks.state(combiner, rank_of(tree, 0), 3))
    values = np.asarray(values[0], np.float64)
    (true,) = exact(as_float64(tree, 3), counts)
    once = np.abs(values[0] - true).max()
    running = np.abs(values.mean(0) - true).max()
    assert running < 12 * max(once, 1e-6) / num_rounds, (once, running)


def check_scale(combiner, ranks):
    """Small and large gradients are combined with the same relative error."""
    combine = ranks.run("vmap", lambda group, x, state: combiner.combine(x, 1.0, state, group).value, 2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 5)), jnp.float32)
    state = ranks.state(combiner, x[0], 2)
    value = np.asarray(combine(x, state))
    for exponent in (-80, -40, 0, 40, 80):
        scaled = np.asarray(combine(x * 2.0**exponent, state))
        np.testing.assert_allclose(scaled, value * 2.0**exponent, rtol=1e-6, atol=1e-6 * 2.0**exponent)


def check_laws(combiner, ranks):
    """What every combination of replicas keeps: one replica, equal ones, their order, their scale."""
    x, y = np.random.default_rng(0).normal(size=(2, 6, 5)).astype(np.float32)
    state = ranks.state(combiner, x, 2)
    run = ranks.run("vmap", lambda group, x, n, state: combiner.combine(x, n, state, group).value, 2)

    def combine(first, second, counts=(2.0, 2.0)):
        return np.asarray(run(jnp.stack([first, second]), jnp.asarray(counts), state)[0])

    value = combine(x, y)
    # the only replica with examples is the result, and equal ones are: their mean, or their sum
    np.testing.assert_allclose(combine(x, y, (3.0, 0.0)), x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(combine(x, y, (0.0, 1.0)), y, rtol=1e-5, atol=1e-6)
    equal = combine(x, x)
    assert np.allclose(equal, x, rtol=1e-5, atol=1e-6) or np.allclose(equal, 2 * x, rtol=1e-5, atol=1e-6)
    # swapped replicas give the same, scaled ones the same scaled
    np.testing.assert_allclose(combine(y, x), value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(combine(-4 * x, -4 * y), -4 * value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "kind", "size"), CASES)
def test_rounds(name, kind, size, ranks, references):
    like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    expected = references.of(name, like, size) if name in TOLERANCES else None
    check_rounds(make_combiner(name), ranks, kind, size, expected, TOLERANCES.get(name, 0))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=full_of(name)) for name in (*REGISTERED, *VARIANTS)]
)
def test_flags(name, ranks):
    check_flags(make_combiner(name), ranks)


@pytest.mark.parametrize("name", COMBINERS)
def test_laws(name, ranks):
    check_laws(make_combiner(name), ranks)


@pytest.mark.parametrize("name", COMBINERS)
def test_an_entry_shows_a_result_by_value(name):
    """A doctest of the factory: no law tells a median from a mean."""
    assert doctest.DocTestFinder(recurse=False).find(COMBINERS[name], name)[0].examples


def test_the_example_of_a_users_own_combiner_keeps_the_contract(ranks):
    median = load_combiner(f"{Path(__file__).parents[2] / 'examples' / 'own_combiner.py'}:median")
    check_rounds(median, ranks, "vmap", 3)
    check_flags(median, ranks)
    check_laws(median, ranks)


@pytest.mark.parametrize("codec", REGISTERED_CODECS)
def test_codec(codec, ranks, references):
    check_feedback(make_combiner(f"{codec}+mean"), ranks, references.mean)
    check_scale(make_combiner(f"{codec}+mean"), ranks)


def test_feedback_before_a_sum(ranks, references):
    check_feedback(make_combiner("bfloat16+sum"), ranks, references.sum)
