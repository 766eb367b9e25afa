"""The mean of leaves that are sent by themselves: the values of those that share a message."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.combine import MeshGroup, make_combiner

MEAN = importlib.import_module("shardtrain.combine.mean")


@pytest.mark.parametrize("name", ["mean", "sum"])
@pytest.mark.parametrize(("large", "counts"), [(0, [3, 1, 4]), (4, [3, 0, 4]), (100, [0, 0, 0])])
def test_large_leaves_have_the_values_of_packed_ones(name, large, counts, monkeypatch):
    monkeypatch.setattr(MEAN, "LARGE", large)
    generator = np.random.default_rng(0)
    tree = [generator.normal(size=(3, *shape)).astype(np.float32) for shape in ((2, 3), (3,), ())]
    for leaf in tree:
        leaf[np.array(counts) == 0] = np.nan
    group = MeshGroup("data", 3)

    def combine(tree, count):
        return make_combiner(name).combine(tree, count, (), group).value

    found = jax.vmap(combine, axis_name="data")(tree, jnp.array(counts, jnp.float32))
    total, means = max(sum(counts), 1), np.count_nonzero(counts) if name == "sum" else 1
    for leaf, ours in zip(tree, found, strict=True):
        expected = sum(n * leaf[i] for i, n in enumerate(counts) if n) * means / total
        np.testing.assert_allclose(ours, np.broadcast_to(expected, leaf.shape), rtol=1e-6, atol=1e-7)


def test_sums_of_16_bits_are_added_in_float32_and_rounded_once():
    """257 is no bfloat16, and 256 + 1 + 1 + 1 = 259 becomes 260; rounded after each addition it stays 256."""
    narrow = jnp.array([[256.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], jnp.bfloat16)
    wide = jnp.array([257.0, 1.0, 1.0, 1.0])

    def combine(narrow, wide):
        return MEAN.add_up({"narrow": narrow, "wide": wide}, MeshGroup("data", 4))

    found = jax.vmap(combine, axis_name="data")(narrow, wide)
    assert found["narrow"].dtype == jnp.bfloat16
    assert found["narrow"].tolist() == [[260.0, 4.0]] * 4
    assert found["wide"].tolist() == [260.0] * 4
