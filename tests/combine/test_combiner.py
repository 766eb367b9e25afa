"""Chains of codecs and combiners, leaves that combiners refuse, and a combiner of a user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.combine import Combined, Combiner, MeshGroup, chain, int8, make_combiner
from shardtrain.combine.combiner import mask_without_examples


def test_chain_says_what_stands_in_the_wrong_place():
    mean = make_combiner("mean")
    with pytest.raises(ValueError) as error:
        chain(mean, int8(), 3)  # type: ignore[arg-type]
    assert str(error.value).splitlines() == [
        "these links make no chain:",
        "  - link 1 of 3 is a combiner; only the last may be: put the codecs first, and choose one",
        "  - link 3 of 3 is 3; call a factory, such as int8()",
        "  - the last link is not a combiner; end with one, such as mean()",
    ]


def test_only_a_count_of_zero_hides_what_a_rank_holds():
    x = jnp.array([1.0, jnp.nan])
    np.testing.assert_array_equal(mask_without_examples(x, jnp.float32(0)), [0, 0])
    for count in (1.0, jnp.nan):
        np.testing.assert_array_equal(mask_without_examples(x, jnp.float32(count)), x)


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
