"""ResNet of the ImageNet kind: published sizes, a block by hand, its images."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.imagenet_resnet import ImageNetResNetConfig, PostNormBlock


def convolved(x, kernel, stride=1):
    """By loops over the window, padded by half a window on each side."""
    half = kernel.shape[0] // 2
    padded = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
    height, width = (-(-side // stride) for side in x.shape[1:3])
    found: Any = 0
    for row in range(kernel.shape[0]):
        for column in range(kernel.shape[1]):
            part = padded[:, row : row + x.shape[1] : stride, column : column + x.shape[2] : stride]
            found = found + part[:, :height, :width] @ kernel[row, column]
    return found


@pytest.mark.parametrize(("depth", "strides"), [(18, (2, 1)), (50, (1, 2, 1))])
def test_a_block_that_halves_the_image_is_that_of_the_paper(depth, strides):
    """The 3x3 convolution has the stride; a norm follows each, a relu all but the last, and then the sum."""
    config = ImageNetResNetConfig(depth=depth, filters=4)
    block: Any = PostNormBlock(config, 4, 8, stride=2, rngs=nnx.Rngs(0))
    block = nnx.view(block, use_running_average=True)
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 7, 5, 4)).astype(np.float32)

    def normed(layer, x, stride):
        y = convolved(x, np.asarray(layer.convolution.kernel[...]), stride)
        norm = layer.norm
        for name in ("scale", "bias", "mean"):
            getattr(norm, name)[...] = jnp.asarray(random.normal(size=y.shape[-1]), jnp.float32)
        scaled = (y - np.asarray(norm.mean[...])) / np.sqrt(1 + 1e-5)
        return scaled * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])

    y = x
    for i, (layer, stride) in enumerate(zip(block.layers, strides, strict=True)):
        y = normed(layer, y if i == 0 else np.maximum(y, 0), stride)
    expected = np.maximum(y + normed(block.shortcut, x, 2), 0)
    np.testing.assert_allclose(block(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


def test_images_become_a_32nd_as_large_and_then_logits():
    config = ImageNetResNetConfig(depth=18, filters=4, height=20, width=13, classes=6)

    def parts(images):
        model = config(nnx.Rngs(0))
        entering = model.first(images)
        leaving = model.run(model.blocks, entering)
        return entering, leaving, model.last(leaving)

    shapes = [x.shape for x in nnx.eval_shape(parts, jax.ShapeDtypeStruct((3, 20, 13, 3), jnp.float32))]
    assert shapes == [(3, 5, 4, 4), (3, 1, 1, 32), (3, 6)]
    numbers = {depth: ImageNetResNetConfig(depth=depth).num_blocks for depth in (18, 34, 50, 101, 152)}
    assert numbers == {18: 8, 34: 16, 50: 16, 101: 33, 152: 50}
