"""The layers of image models, against their definitions in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.convolution import EPS, MOMENTUM, ChannelNorm, Convolution, check_images

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 5, 4, 6)).astype(np.float32)


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
