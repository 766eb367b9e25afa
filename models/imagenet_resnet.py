"""Residual networks of the ImageNet kind in nnx: `ImageNetResNetConfig` is the factory, `ImageNetResNet` the
model.

`resnet.py` has the kind for small images, with norms before convolutions; `convolution.py` the parts of both.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, CHANNELS_IN, VOCAB
from shardtrain.models import checks
from shardtrain.models.convolution import (
    WRITTEN,
    ChannelNorm,
    Convolution,
    ImageNorms,
    check_images,
    run_blocks,
)
from shardtrain.models.layers import Linear

BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Depth -> blocks at each of four sizes of the image."""
BOTTLENECK = 50
"""Least depth whose blocks have three convolutions, with four times as many channels outside."""


@dataclass(frozen=True, kw_only=True)
class ImageNetResNetConfig:
    """Sizes and options of a ResNet of the ImageNet kind; called with `nnx.Rngs` it builds the model.

    A 7x7 convolution and a pooling make the image a quarter as high and wide; four groups of blocks follow,
    of which all but the first halve it again, by the 3x3 convolution of their first block ("version 1.5").
    Convolutions have no bias, and each has a norm behind it.

    Args:
      depth: number of layers: 18, 34, 50, 101 or 152.
      filters: channels of the first convolution, 64 in the paper.
      height: rows of an image.
      width: columns of an image.
      colours: channels of an image.
      classes: number of classes, the dim vocab.
      norm: "batch", as published, has the statistics of one microbatch of one replica (its running statistics
        are model_state); "group" gives the same numbers however a batch is cut.
      num_groups: groups of channels of a group norm.
      remat: whether the backward pass computes each block again from its input.
      scan: walk over blocks that are alike with `jax.lax.scan`, or unroll them.
      dtype: compute dtype; parameters, norms and logits are float32.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.

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
    colours: int = 3
    classes: int = 1000
    norm: ImageNorms = "batch"
    num_groups: int = 32
    remat: bool = False
    scan: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self):
        checks.refuse("ImageNetResNetConfig", _problems(self))

    @property
    def num_blocks(self) -> int:
        """Residual blocks."""
        return sum(BLOCKS[self.depth])

    @property
    def sizes(self) -> dict[str, int]:
        """The size of the dims of the head, by name."""
        return {CHANNELS_IN: self.filters * 8 * self.expansion, VOCAB: self.classes}

    @property
    def expansion(self) -> int:
        """Channels of a block's output, in multiples of those inside."""
        return 4 if self.depth >= BOTTLENECK else 1

    def __call__(self, rngs: nnx.Rngs) -> "ImageNetResNet":
        """Build the model; `rngs` needs the stream "params"."""
        return ImageNetResNet(self, rngs=rngs)


def _problems(config: ImageNetResNetConfig) -> list[str]:
    found = checks.positive({f.name: getattr(config, f.name) for f in fields(config) if f.type is int})
    if config.depth > 0 and config.depth not in BLOCKS:
        near = min(BLOCKS, key=lambda depth: abs(depth - config.depth))
        found.append(f"depth is {config.depth}; allowed are {', '.join(map(str, BLOCKS))}. Use depth={near}.")
    if config.norm == "group" and config.filters > 0 and config.num_groups > 0:
        found += checks.multiple("filters", config.filters, "num_groups", config.num_groups)
    found += checks.choice("norm", config.norm, ("group", "batch"))
    return found + checks.choice("dtype", config.dtype, ("float32", "bfloat16", "float16"))


class NormedConvolution(nnx.Module):
    """A convolution without a bias, and a norm."""

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
        self.norm = ChannelNorm(config.norm, channels[1], num_groups=config.num_groups, dtype=config.dtype)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        return self.norm(self.convolution(x_BHWC))


class PostNormBlock(nnx.Module):
    """Two or three convolutions with norms, added to the input; where the shape changes, to a 1x1 convolution
    of it. A relu follows each, the last after the sum."""

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


class ImageNetResNet(nnx.Module):
    """Images to logits. `nnx.view(resnet, use_running_average=True)` is the same model for evaluation.

    A call is the composition of its parts: `first`, then `run` on `blocks`, then `last`.
    """

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
        self.head = Linear(
            (CHANNELS_IN,), (VOCAB,), sizes=config.sizes, std=entering**-0.5, bias=True, dtype=config.dtype,
            rngs=rngs,
        )  # fmt: skip

    def __call__(self, images: jax.Array) -> jax.Array:
        """Score each image against the classes.

        Args:
          images: float (batch, height, width, colours).

        Returns:
          Logits (batch, classes), float32.

        Raises:
          ValueError: if the images are of another size than the model's.
        """
        return self.last(self.run(self.blocks, self.first(images), self.block_keys()))

    def first(self, images: jax.Array) -> jax.Array:
        """The first convolution, its norm and relu, and the maximum of 3 x 3 pixels, of every second one."""
        check_images(images.shape, (self.config.height, self.config.width, self.config.colours))
        x_BHWC = jax.nn.relu(self.stem(images.astype(self.config.dtype)))
        both_sides: Any = ((1, 1), (1, 1))
        pooled = nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=both_sides)
        return with_logical_constraint(pooled, WRITTEN)

    def block_keys(self) -> None:
        """No block draws random numbers."""
        return

    def run(self, blocks: Any, x_BHWC: jax.Array, keys: None = None) -> jax.Array:
        """Apply blocks to images, in order: all, or those of a pipeline stage."""
        return run_blocks(blocks, x_BHWC, remat=self.config.remat, scan=self.config.scan)

    def last(self, x_BHWC: jax.Array) -> jax.Array:
        """Mean over the pixels and score."""
        logits_BV = self.head(with_logical_constraint(x_BHWC.mean((1, 2)), (BATCH, CHANNELS_IN)))
        return with_logical_constraint(logits_BV.astype(jnp.float32), (BATCH, VOCAB))
