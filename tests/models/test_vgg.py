"""VGG: published sizes, its parts, dropout in its classifier, and a batch that is cut."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import fill, list_parameters
from flax import nnx

from shardtrain.models.vgg import VggConfig

CONFIG = VggConfig(filters=4, num_groups=2, colours=1, hidden=16, classes=8)
RNG = np.random.default_rng(0)

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("depth", "kernels"), [(16, 14_714_688), (19, 20_024_384)])
def test_sizes_are_the_published_ones(depth, kernels):
    """Of the convolutions as Keras counts them without a top; norms add 2 a channel, then comes the head."""
    config = VggConfig(depth=depth, hidden=None)
    parameters = list_parameters(config)
    num_norm = 2 * sum(v.shape[-1] for path, v in parameters if path[-2:] == ("convolution", "bias"))
    num_head = 512 * 10 + 10
    assert num_norm == {16: 8_448, 19: 11_008}[depth]
    assert sum(math.prod(v.shape) for _, v in parameters) == kernels + num_norm + num_head
    hidden = list_parameters(replace(config, hidden=4096))
    more = 512 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
    assert sum(math.prod(v.shape) for _, v in hidden) == kernels + num_norm + more


def test_the_image_is_halved_five_times(pure):
    module = nnx.eval_shape(lambda: CONFIG(nnx.Rngs(0)))
    assert len(module.blocks) == CONFIG.num_blocks == 13
    sizes, x = [], jax.ShapeDtypeStruct((4, 32, 32, 1), jnp.float32)
    for block in module.blocks:
        x = jax.eval_shape(lambda block, x: block(x), block, x)
        sizes.append(x.shape[1:])
    assert sizes[1::2][:2] == [(16, 16, 4), (8, 8, 8)]
    assert [sizes[i] for i in (6, 9, 12)] == [(4, 4, 16), (2, 2, 32), (1, 1, 32)]


def test_the_classifier_has_two_hidden_layers(pure, quick_jit):
    params = pure(CONFIG).params
    filled = functools.partial(fill, CONFIG, params)
    x = RNG.normal(size=(4, 1, 1, 32)).astype(np.float32)
    first, second, third = params["classifier"].values()
    h = np.maximum(x[:, 0, 0] @ first["kernel"] + first["bias"], 0)
    h = np.maximum(h @ second["kernel"] + second["bias"], 0)
    assert_close(quick_jit(lambda: filled().last(x))(), h @ third["kernel"] + third["bias"])
