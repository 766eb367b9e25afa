"""Residual networks for ImageNet in nnx: `ImageNetResNetConfig` builds the model `ImageNetResNet`.

`resnet.py` has networks for small images, with norms before convolutions; `convolution.py` has shared parts.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import CHANNELS_IN, VOCAB
from shardtrain.models import checks
from shardtrain.models.convolution import (
    WRITTEN,
    Convolution,
    ImageModel,
    ImageNorms,
    ImageOptions,
    make_channel_norm,
)

BLOCKS = {
    18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3),
}  # fmt: skip
"""Depth -> number of blocks at each of four image sizes."""
BOTTLENECK = 50
"""Smallest depth with bottleneck blocks: three convolutions, and four times as many channels outside."""


@dataclass(frozen=True, kw_only=True)
class ImageNetResNetConfig(ImageOptions):
    """Sizes and options of a ResNet for ImageNet; called with `nnx.Rngs` it builds the model.

    A 7x7 convolution and a pooling reduce height and width to a quarter. Four groups of blocks follow; each
    group but the first halves the image again, by the 3x3 convolution of its first block ("version 1.5").
    Convolutions have no bias, and a norm follows each.

    Args:
      depth: number of layers: 18, 34, 50, 101 or 152.
      norm: "batch", as published, or "group".
      scan: whether equal blocks run in `jax.lax.scan`; otherwise they are unrolled.

    References:
      He et al. 2015, Deep residual learning, https://arxiv.org/abs/1512.03385, table 1; the stride as in
      Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 5.1.

    >>> ImageNetResNetConfig(depth=50).num_blocks
    16
    """

    depth: int = 50
    filters: int = 64
    height: int = 224
    width: int = 224
    classes: int = 1000
    norm: ImageNorms = "batch"
    num_groups: int = 32
    scan: bool = True

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        return super().list_problems() + checks.depth(self.depth, BLOCKS)

    @property
    def num_blocks(self) -> int:
        """Number of residual blocks."""
        return sum(BLOCKS[self.depth])

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim of the head, by name."""
        return {CHANNELS_IN: self.filters * 8 * self.expansion, VOCAB: self.classes}

    @property
    def expansion(self) -> int:
        """Ratio of the channels of a block's output to the channels inside."""
        return 4 if self.depth >= BOTTLENECK else 1

    def __call__(self, rngs: nnx.Rngs) -> "ImageNetResNet":
        """Build the model; `rngs` needs the stream "params"."""
        return ImageNetResNet(self, rngs=rngs)


class NormedConvolution(nnx.Module):
    """A convolution without a bias, followed by a norm."""

    def __init__(
        self,
        config: ImageNetResNetConfig,
        channels: tuple[int, int],
        window: int,
        *,
        stride: int = 1,
        of_image: bool = False,
        rngs: nnx.Rngs,
    ):
        self.convolution = Convolution(
            *channels, window, stride=stride, of_image=of_image, bias=False, both_sides=True,
            dtype=config.dtype, rngs=rngs,
        )  # fmt: skip
        self.norm = make_channel_norm(config, channels[1])

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        return self.norm(self.convolution(x_BHWC))


class PostNormBlock(nnx.Module):
    """Two or three convolutions with norms, added to the input, or to a 1x1 convolution of it if the shape
    changes. A relu follows each, the last after the sum."""

    def __init__(
        self, config: ImageNetResNetConfig, entering: int, inside: int, *, stride: int, rngs: nnx.Rngs
    ):
        leaving = inside * config.expansion
        # the 3x3 convolution has the stride, which is the second of three or the first of two
        layers = [(entering, inside, 3, stride), (inside, inside, 3, 1)]
        if config.expansion > 1:
            layers = [(entering, inside, 1, 1), (inside, inside, 3, stride), (inside, leaving, 1, 1)]
        self.layers = nnx.List(
            [
                NormedConvolution(config, (into, out), window, stride=step, rngs=rngs)
                for into, out, window, step in layers
            ]
        )
        changes = stride > 1 or entering != leaving
        self.shortcut = (
            NormedConvolution(config, (entering, leaving), 1, stride=stride, rngs=rngs) if changes else None
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        y_BHWC = x_BHWC
        for i, layer in enumerate(self.layers):
            y_BHWC = layer(y_BHWC if i == 0 else jax.nn.relu(y_BHWC))
        x_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        return with_logical_constraint(jax.nn.relu(x_BHWC + y_BHWC), WRITTEN)


class ImageNetResNet(ImageModel):
    """Map images to logits; `nnx.view(resnet, use_running_average=True)` for evaluation."""

    def __init__(self, config: ImageNetResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = NormedConvolution(
            config, (config.colours, config.filters), 7, stride=2, of_image=True, rngs=rngs
        )
        blocks, entering = [], config.filters
        for group, count in enumerate(BLOCKS[config.depth]):
            inside = config.filters * 2**group
            for i in range(count):
                stride = 2 if group > 0 and i == 0 else 1
                blocks.append(PostNormBlock(config, entering, inside, stride=stride, rngs=rngs))
                entering = inside * config.expansion
        self.blocks = nnx.List(blocks)
        self.head = self.make_head(entering, entering**-0.5, rngs)

    def first(self, images: jax.Array) -> jax.Array:
        """Apply the first convolution, its norm and relu, and a 3 x 3 maximum with a stride of 2."""
        x_BHWC = jax.nn.relu(self.stem(self.read_images(images)))
        both_sides: Any = ((1, 1), (1, 1))
        pooled = nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=both_sides)
        return with_logical_constraint(pooled, WRITTEN)

    def last(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the logits, from the mean over the pixels."""
        return self.score(self.head, x_BHWC.mean((1, 2)))
