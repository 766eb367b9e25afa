"""ResNet of the ImageNet kind: its images; the numbers of its blocks are those of test_resnet_files.py."""

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.models.imagenet_resnet import ImageNetResNetConfig


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
