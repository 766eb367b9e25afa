"""The classifier against its definition in numpy."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.mlp import MlpConfig

CONFIG = MlpConfig(features=12, mlp=16, num_layers=2, classes=5)
IMAGES = np.random.default_rng(0).normal(size=(3, 3, 4)).astype(np.float32)


def test_logits_are_those_of_residual_blocks(pure):
    params = pure(CONFIG).params
    x = IMAGES.reshape(3, 12)
    for i in range(2):
        norm, up, down = (params["blocks"][i][name] for name in ("norm", "up", "down"))
        h = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * norm["scale"] + norm[
            "bias"
        ]
        x = x + np.maximum(h @ up["kernel"] + up["bias"], 0) @ down["kernel"] + down["bias"]
    expected = x @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(pure(CONFIG).apply(params, IMAGES), expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_switched_by_deterministic():
    model = replace(CONFIG, dropout=0.5)(nnx.Rngs(params=0, dropout=1))
    images = jnp.asarray(IMAGES)
    plain = CONFIG(nnx.Rngs(params=0))(images)
    np.testing.assert_array_equal(nnx.view(model, deterministic=True)(images), plain)
    assert not np.allclose(model(images), plain)


def test_examples_of_another_size_are_refused(pure):
    with pytest.raises(ValueError, match="hold 25") as error:
        pure(CONFIG).apply(pure(CONFIG).params, jnp.zeros((2, 5, 5)))
    assert str(error.value) == (
        "examples of shape (5, 5) hold 25 numbers, the model takes features=12. Build it with features=25."
    )
