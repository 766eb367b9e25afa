"""What every combiner keeps to, on every kind of group, for any number of ranks, with and without codecs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.combine import Combined, Combiner, MeshGroup, chain, int8, make_combiner
from shardtrain.combine.combiner import contribution

SHAPES = {"matrix": (6, 5), "few": (2,), "none": (0,), "scalar": (), "short": (7,)}
NARROW = "short"
"""The leaf that is bfloat16 from the start."""

COMBINERS = {
    # name -> relative tolerance: of float32 sums, or of 16 bits, which round what crosses and the result
    "mean": 2e-6,
    "sum": 2e-6,
    "adasum": 5e-6,
    "adasum:whole": 2e-3,  # what rounding does to the leaf of 16 bits tells in the one coefficient of all
    "bfloat16+mean": 2**-6,
    "float16+sum": 2**-9,
    "bfloat16+adasum": 2**-5,
    "int8+mean": 2e-5,
    "int8+adasum": 1e-4,
    "top_k:0.3+mean": 1e-5,
    "top_k:0.3+adasum": 5e-5,
    "power_sgd:2+mean": 1e-4,
    "power_sgd:2+adasum": 1e-4,
    "bfloat16+int8+mean": 2**-5,
}
ALL = [("mesh", 1), ("mesh", 2), ("mesh", 3), ("mesh", 4), ("mesh", 5), ("mesh", 8), ("vmap", 9)]
GROUPS = {"mean": ALL, "adasum": ALL, "bfloat16+mean": ALL, "int8+mean": ALL}
# one compiles longer than it runs
OTHERS = [("mesh", 3), ("vmap", 4)]
CASES = [(name, *group) for name in COMBINERS for group in GROUPS.get(name, OTHERS)]
BFLOAT16_EPS = 2**-8


def trees(size, seed):
    """Rank-stacked leaves."""
    random = np.random.default_rng(seed)
    tree = {name: random.normal(size=(size, *shape)) + 0.5 for name, shape in SHAPES.items()}
    return {k: jnp.asarray(v, jnp.bfloat16 if k == NARROW else jnp.float32) for k, v in tree.items()}


def as_float64(tree, size):
    return [[np.asarray(x[r], np.float64) for x in jax.tree.leaves(tree)] for r in range(size)]


def reference(name, size, combiner, references):
    """A function of (ranks, counts) that keeps what the combiner keeps."""
    *codecs, last = name.split("+")
    combine = getattr(references, last.partition(":")[0])
    if last == "adasum:whole":
        return lambda ranks, counts: references.adasum(ranks, counts, [0] * len(SHAPES))
    shapes = [SHAPES[k] for k in sorted(SHAPES)]
    for codec in reversed(codecs):
        codec, _, argument = codec.partition(":")
        if codec == "power_sgd":
            like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
            kept = [None if q is None else np.asarray(q, np.float64) for q in combiner.init(like).codec]
            if last == "mean":
                return references.PowerMean(combine, size, shapes, kept)
            combine = references.Coded(references.power_sgd, combine, size, shapes, kept)
        else:
            encode = references.top_k(float(argument)) if codec == "top_k" else getattr(references, codec)
            combine = references.Coded(encode, combine, size, shapes)
    return combine


def close(found, expected, ranks, tolerance):
    for i, (name, x, y) in enumerate(zip(sorted(SHAPES), jax.tree.leaves(found), expected, strict=True)):
        if not x.size:
            continue
        scale = max(np.abs(leaves[i]).max() for leaves in ranks)
        atol = scale * (max(tolerance, 4 * BFLOAT16_EPS) if name == NARROW else tolerance)
        np.testing.assert_allclose(np.asarray(x[0], np.float64), y, rtol=0, atol=atol, err_msg=name)


def same_on_all_ranks(tree):
    for x in jax.tree.leaves(tree):
        assert (np.asarray(x) == np.asarray(x)[:1]).all()


def equal(tree, other):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def rank_of(tree, rank):
    return jax.tree.map(lambda x: x[rank], tree)


@pytest.mark.parametrize(("name", "kind", "size"), CASES)
def test_combiner_keeps_the_contract(name, kind, size, ranks, references):
    combiner = make_combiner(name)
    combine = ranks.run(
        kind, lambda group, tree, count, state: combiner.combine(tree, count, state, group)[:3], size
    )
    state = ranks.state(combiner, rank_of(trees(size, 0), 0), size)
    expected = reference(name, size, combiner, references)
    empty = size - 2 if size > 1 else None

    # three rounds, the state carried on; a rank without examples holds anything
    for step in range(3):
        tree = trees(size, step)
        counts = np.arange(1, size + 1, dtype=np.float32) % 4 + 1
        if empty is not None and step == 1:
            counts[empty] = 0
            tree = jax.tree.map(lambda x: x.at[empty].set(jnp.nan), tree)
        value, after, metrics = combine(tree, jnp.asarray(counts), state)
        for x, leaf in zip(jax.tree.leaves(value), jax.tree.leaves(tree), strict=True):
            assert (x.shape, x.dtype) == (leaf.shape, leaf.dtype)
        same_on_all_ranks((value, metrics))
        assert all(x.dtype == jnp.float32 and bool(jnp.isfinite(x).all()) for x in metrics.values())
        clean = [[np.nan_to_num(x) for x in rank] for rank in as_float64(tree, size)]
        close(value, expected(clean, counts), clean, COMBINERS[name])
        if empty is not None and step == 1:
            kept, before = rank_of(after, empty), rank_of(state, empty)
            if name.startswith("power_sgd") and name.endswith("mean"):  # the right factors are everybody's
                kept, before = kept.residual, before.residual
            equal(kept, before)
        state = after

    # what is not finite reaches every rank, and no state
    for bad, leaf in ((jnp.nan, "matrix"), (jnp.inf, "scalar"), (-jnp.inf, NARROW)):
        tree = trees(size, 5)
        first = (size - 1, *([0] * len(SHAPES[leaf])))
        tree[leaf] = tree[leaf].at[first].set(bad)
        value, after, _ = combine(tree, jnp.ones(size), state)
        for rank in range(size):
            assert not np.isfinite(np.asarray(value[leaf][rank], np.float32)).all(), (leaf, rank)
        equal(after, state)

    # no examples at all
    value, after, metrics = combine(tree, jnp.zeros(size), state)
    assert all(not np.asarray(x, np.float32).any() for x in jax.tree.leaves(value))
    assert all(bool((x == 1).all()) for x in metrics.values())
    equal(after, state)


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("bfloat16+mean", 64),
        ("float16+mean", 64),
        ("bfloat16+sum", 64),
        ("int8+mean", 64),
        ("top_k:0.2+mean", 64),
        ("power_sgd:1+mean", 64),
    ],
)
def test_error_feedback_makes_the_running_mean_exact(name, rounds, ranks, references):
    size = 3
    combiner = make_combiner(name)
    random = np.random.default_rng(0)
    tree = {"matrix": jnp.asarray(random.normal(size=(size, 6, 5)), jnp.float32)}
    counts = jnp.array([1.0, 2.0, 1.0])

    def all_rounds(group, tree, count, state):
        def step(state, _):
            found = combiner.combine(tree, count, state, group)
            return found.state, found.value["matrix"]

        return jax.lax.scan(step, state, None, length=rounds)[1]

    values = ranks.run("vmap", all_rounds, size)(tree, counts, ranks.state(combiner, rank_of(tree, 0), size))
    values = np.asarray(values[0], np.float64)
    combine = references.sum if name.endswith("sum") else references.mean
    (true,) = combine(as_float64(tree, size), counts)
    once = np.abs(values[0] - true).max()
    running = np.abs(values.mean(0) - true).max()
    assert once > 1e-5
    # what is owed is bounded, so the error of the running mean falls as 1 / rounds
    assert running < 12 * once / rounds, (once, running)


@pytest.mark.parametrize("codec", ["bfloat16", "float16", "int8", "top_k:0.2", "power_sgd:2"])
def test_codecs_do_the_same_at_any_scale(codec, ranks):
    combiner = make_combiner(f"{codec}+mean")
    combine = ranks.run("vmap", lambda group, x, state: combiner.combine(x, 1.0, state, group).value, 2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 5)), jnp.float32)
    state = ranks.state(combiner, x[0], 2)
    value = np.asarray(combine(x, state))
    for exponent in (-80, -40, 0, 40, 80):
        scaled = np.asarray(combine(x * 2.0**exponent, state))
        np.testing.assert_allclose(scaled, value * 2.0**exponent, rtol=1e-6, atol=1e-6 * 2.0**exponent)


def test_chain_says_what_stands_in_the_wrong_place():
    mean = make_combiner("mean")
    with pytest.raises(ValueError) as error:
        chain(mean, int8(), 3)  # type: ignore[arg-type]
    assert str(error.value).splitlines() == [
        "these links make no chain:",
        "  - link 1 of 3 is a combiner; only the last may be: put the codecs first, and choose one",
        "  - link 3 of 3 is 3; call a factory, such as int8()",
        "  - no combiner stands last; end with one, such as mean()",
    ]


def test_only_a_count_of_zero_hides_what_a_rank_holds():
    x = jnp.array([1.0, jnp.nan])
    np.testing.assert_array_equal(contribution(x, jnp.float32(0)), [0, 0])
    for count in (1.0, jnp.nan):
        np.testing.assert_array_equal(contribution(x, jnp.float32(count)), x)


def test_leaves_of_other_dtypes_are_refused():
    combiner = make_combiner("mean")
    tree = {"a": {"b": jnp.arange(3)}, "c": jnp.ones(2)}
    with pytest.raises(ValueError) as error:
        combiner.combine(tree, 1.0, (), MeshGroup("data", 1))
    assert str(error.value).splitlines() == [
        "combiners take leaves of float32, bfloat16, float16:",
        "  - leaf a/b is int32; use .astype('float32')",
    ]


def test_a_combiner_of_ones_own(ranks):
    """Momentum of the ranks' mean: a state, also behind a codec that gathers."""

    def combine(tree, count, state, group):
        total = group.all_reduce(count)
        mean = jax.tree.map(lambda x: group.all_reduce(jnp.where(count > 0, x * count, 0)) / total, tree)
        state = jax.tree.map(lambda m, g: 0.5 * m + g, state, mean)
        return Combined(state, state)

    own = Combiner(lambda tree: jax.tree.map(jnp.zeros_like, tree), combine)
    tree = jnp.array([[127.0, 0.0], [0.0, 127.0]])  # what int8 sends exactly
    for combiner in (own, chain(int8(), own)):
        run = ranks.run("mesh", lambda group, *a, c=combiner: c.combine(a[0], a[1], a[2], group)[:2], 2)
        state = ranks.state(combiner, tree[0], 2)
        for expected in (63.5, 95.25):
            value, state = run(tree, jnp.ones(2), state)
            np.testing.assert_array_equal(value, np.full((2, 2), expected))
