"""The layers of image models, against their definitions in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.convolution import EPS, MOMENTUM, ChannelNorm, Convolution, check_images

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 5, 4, 6)).astype(np.float32)


@pytest.mark.parametrize("of_image", [False, True])
@pytest.mark.parametrize(("window", "stride"), [(3, 1), (1, 1), (1, 2)])
def test_a_convolution_is_a_sum_over_its_window(window, stride, of_image):
    module = Convolution(6, 2, window, stride=stride, of_image=of_image, dtype="float32", rngs=nnx.Rngs(0))
    bias: Any = module.bias
    bias[...] = jnp.array([1.0, -2.0])
    kernel = np.asarray(module.kernel[...]).reshape(window, window, 6, 2)
    edge = window // 2
    padded = np.pad(IMAGES, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    expected = np.full((3, 5, 4, 2), bias[...])
    for row in range(window):
        for column in range(window):
            expected += padded[:, row : row + 5, column : column + 4] @ kernel[row, column]
    np.testing.assert_allclose(
        module(jnp.asarray(IMAGES)), expected[:, ::stride, ::stride], rtol=1e-5, atol=1e-5
    )


def test_the_kernel_of_the_image_has_no_dim_of_colours():
    """Three colours cannot be split over fsdp; a kernel of others can."""
    of_image, other = (
        Convolution(3, 8, 3, of_image=of_image, dtype="float32", rngs=nnx.Rngs(0))
        for of_image in (True, False)
    )
    assert of_image.kernel.get_metadata()["out_sharding"] == ("height", "width", "channels_out")
    assert of_image.kernel.shape == (3, 9, 8)
    assert other.kernel.get_metadata()["out_sharding"] == ("height", "width", "channels_in", "channels_out")
    assert other.kernel.shape == (3, 3, 3, 8)


def test_initial_values_have_the_variance_of_he():
    kernel = np.asarray(Convolution(16, 64, 3, dtype="float32", rngs=nnx.Rngs(0)).kernel[...])
    assert kernel.std() == pytest.approx((2 / (9 * 16)) ** 0.5, rel=0.05)


def normed(x, axes):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + EPS)


def test_group_norm_is_over_the_pixels_and_channels_of_a_group():
    norm = ChannelNorm("group", 6, num_groups=2, dtype="float32")
    norm.scale[...], norm.bias[...] = jnp.arange(6.0), jnp.arange(6.0) - 3
    expected = normed(IMAGES.reshape(3, 5, 4, 2, 3), (1, 2, 4)).reshape(IMAGES.shape)
    expected = expected * np.arange(6) + np.arange(6) - 3
    np.testing.assert_allclose(norm(jnp.asarray(IMAGES)), expected, rtol=1e-4, atol=1e-5)
    assert not jax.tree.leaves(nnx.state(norm, nnx.BatchStat))


def test_batch_norm_is_over_images_and_keeps_running_averages():
    norm = ChannelNorm("batch", 6, num_groups=2, dtype="float32")
    np.testing.assert_allclose(norm(jnp.asarray(IMAGES)), normed(IMAGES, (0, 1, 2)), rtol=1e-4, atol=1e-5)
    mean, variance = IMAGES.mean((0, 1, 2)), IMAGES.var((0, 1, 2))
    mean, variance = (1 - MOMENTUM) * mean, MOMENTUM + (1 - MOMENTUM) * variance
    np.testing.assert_allclose(norm.mean[...], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.variance[...], variance, rtol=1e-5)
    evaluating = nnx.view(norm, use_running_average=True)
    expected = (IMAGES - mean) / np.sqrt(variance + EPS)
    np.testing.assert_allclose(evaluating(jnp.asarray(IMAGES)), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.mean[...], mean, rtol=1e-5, atol=1e-6)


def test_norms_compute_in_float32():
    """In bfloat16 the variance of numbers around 1000 would be lost."""
    images = jnp.asarray(1000 + IMAGES)
    for kind in ("group", "batch"):
        norm = ChannelNorm(kind, 6, num_groups=2, dtype="bfloat16")
        y = norm(images)
        assert y.dtype == jnp.bfloat16
        assert float(jnp.std(y.astype(jnp.float32))) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((2, 8, 8), "Give four dims, the last of size 1."),
        ((2, 28, 28, 3), "Build it with height=28, width=28, colours=3."),
    ],
)
def test_images_of_another_size_are_refused(shape, change):
    with pytest.raises(ValueError, match="were given to a model of") as error:
        check_images(shape, (8, 8, 1))
    assert str(error.value) == f"images of shape {shape[1:]} were given to a model of (8, 8, 1). {change}"
