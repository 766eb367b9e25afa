"""Residual networks of pre-activation bottleneck blocks (ResNet-v2) for small images in nnx.

`ResNetConfig` is the factory, `ResNet` the model. Its blocks are an `nnx.List`, for they differ in shape;
those that are alike may be stored in stacks. `convolution.py` has its parts.
"""

from collections.abc import Callable
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
    Stack,
    check_images,
    run_blocks,
)
from shardtrain.models.layers import Linear

NUM_GROUPS_OF_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Sizes and options of a ResNet; called with `nnx.Rngs` it builds the model.

    Blocks are 1x1, 3x3, 1x1 convolutions, each after a norm and a relu, in three groups of n blocks: inner
    channels are 1, 4 and 8 times `filters`, outer ones 4, 8 and 16 times; the second and third group halve
    the image. These are the widths of Keras' CIFAR example, which HyPar-Flow took; in the paper itself the
    inner ones are 1, 2 and 4 times.

    Args:
      depth: number of layers, 9 n + 2: 20, 110 (n = 12), 1001 (n = 111).
      filters: channels of the first convolution; 16 for CIFAR, 4 for a narrow one.
      height: rows of an image.
      width: columns of an image.
      colours: channels of an image.
      classes: number of classes, the dim vocab.
      norm: "group" gives the same numbers however a batch is cut; "batch" does not, for its statistics are
        those of one microbatch of one replica (its running statistics are model_state).
      num_groups: groups of channels of a group norm. With as many as `filters` a group is one channel, whose
        mean takes the bias of the convolution away again.
      remat: whether the backward pass computes each block again from its input.
      scan: walk over blocks that are alike with `jax.lax.scan`, or unroll them (at 1001 layers compiling
        then takes ten times as long).
      stack: how many blocks that are alike are stored as one, in arrays with a first dim layers; 1: none are.
        The numbers stay the same. All programs of a deep network are smaller then, and a pipeline cuts
        between stacks: 11 makes 33 of the 333 blocks of 1001 layers. A checkpoint is of one way to store.
      dtype: compute dtype; parameters, norms and logits are float32.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.

    References:
      He et al. 2016, Identity mappings in deep residual networks, https://arxiv.org/abs/1603.05027, figure 4e
      and section 4; Awan et al. 2020, HyPar-Flow, https://arxiv.org/abs/1911.05146.

    >>> ResNetConfig(depth=1001, filters=4, classes=10).num_blocks
    333
    """

    depth: int = 20
    filters: int = 16
    height: int = 32
    width: int = 32
    colours: int = 3
    classes: int = 10
    norm: ImageNorms = "group"
    num_groups: int = 4
    remat: bool = False
    scan: bool = True
    stack: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self):
        checks.refuse("ResNetConfig", _problems(self))

    @property
    def num_blocks(self) -> int:
        """Residual blocks, in three groups of equal length."""
        return (self.depth - 2) // 9 * NUM_GROUPS_OF_BLOCKS

    @property
    def outer_channels(self) -> int:
        """Channels after the last block."""
        return 16 * self.filters

    def __call__(self, rngs: nnx.Rngs) -> "ResNet":
        """Build the model; `rngs` needs the stream "params"."""
        return ResNet(self, rngs=rngs)


def _problems(config: ResNetConfig) -> list[str]:
    found = checks.positive({f.name: getattr(config, f.name) for f in fields(config) if f.type is int})
    if config.depth > 0 and (config.depth < 11 or (config.depth - 2) % 9):
        n = max(1, (config.depth - 2) // 9)
        found.append(
            f"depth is {config.depth}; it must be 9 n + 2. Use depth={9 * n + 2} or depth={9 * n + 11}."
        )
    if config.norm == "group" and config.filters > 0 and config.num_groups > 0:
        found += checks.multiple("filters", config.filters, "num_groups", config.num_groups)
    found += checks.choice("norm", config.norm, ("group", "batch"))
    return found + checks.choice("dtype", config.dtype, ("float32", "bfloat16", "float16"))


class ResidualBlock(nnx.Module):
    """A bottleneck added to its input; where the shape changes a 1x1 convolution brings the input to it.

    Args:
      channels: of the input, inside and of the output.
      stride: of the first convolution.
      activated: whether the input is normed and activated first; not in the first block of all, which
        follows a norm and a relu.
    """

    def __init__(
        self,
        config: ResNetConfig,
        channels: tuple[int, int, int],
        *,
        stride: int,
        activated: bool,
        rngs: nnx.Rngs,
    ):
        # 1x1 to fewer channels, 3x3 among them, 1x1 to the channels of the output
        entering, inside, leaving = channels
        self.norms = nnx.List([_norm(config, n) for n in (entering, inside, inside)[not activated :]])
        windows = (entering, inside, 1), (inside, inside, 3), (inside, leaving, 1)
        self.convolutions = nnx.List(
            [
                Convolution(*sizes, stride=stride if i == 0 else 1, dtype=config.dtype, rngs=rngs)
                for i, sizes in enumerate(windows)
            ]
        )
        # the input can be added as it is only if the output has its shape
        changes = stride > 1 or entering != leaving
        self.shortcut = (
            Convolution(entering, leaving, 1, stride=stride, dtype=config.dtype, rngs=rngs)
            if changes
            else None
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        y_BHWC = x_BHWC
        # pre-activation: norm and relu come before each convolution, but the first of the first block
        skipped = len(self.convolutions) - len(self.norms)
        for i, convolution in enumerate(self.convolutions):
            if i >= skipped:
                y_BHWC = jax.nn.relu(self.norms[i - skipped](y_BHWC))
            y_BHWC = convolution(y_BHWC)
        x_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        return with_logical_constraint(x_BHWC + y_BHWC, WRITTEN)


class ResNet(nnx.Module):
    """Images to logits. `nnx.view(resnet, use_running_average=True)` is the same model for evaluation.

    A call is the composition of its parts: `first`, then `run` on `blocks`, then `last`.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = Convolution(
            config.colours, config.filters, 3, of_image=True, dtype=config.dtype, rngs=rngs
        )
        self.stem_norm = _norm(config, config.filters)
        self.blocks = nnx.List(_blocks(config, rngs))
        self.final_norm = _norm(config, config.outer_channels)
        sizes = {CHANNELS_IN: config.outer_channels, VOCAB: config.classes}
        std = (2 / config.outer_channels) ** 0.5
        self.head = Linear(
            (CHANNELS_IN,), (VOCAB,), sizes=sizes, std=std, bias=True, dtype=config.dtype, rngs=rngs
        )

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
        """The first convolution, its norm and relu: (batch, height, width, channels)."""
        check_images(images.shape, (self.config.height, self.config.width, self.config.colours))
        x_BHWC = self.stem(images.astype(self.config.dtype))
        return jax.nn.relu(self.stem_norm(x_BHWC))

    def block_keys(self) -> None:
        """No block draws random numbers."""
        return

    def run(self, blocks: Any, x_BHWC: jax.Array, keys: None = None) -> jax.Array:
        """Apply blocks to images, in order: all, or those of a pipeline stage."""
        return run_blocks(blocks, x_BHWC, remat=self.config.remat, scan=self.config.scan)

    def last(self, x_BHWC: jax.Array) -> jax.Array:
        """Norm, relu, mean over the pixels and score."""
        x_BC = jax.nn.relu(self.final_norm(x_BHWC)).mean((1, 2))
        logits_BV = self.head(with_logical_constraint(x_BC, (BATCH, CHANNELS_IN)))
        return with_logical_constraint(logits_BV.astype(jnp.float32), (BATCH, VOCAB))


def _blocks(config: ResNetConfig, rngs: nnx.Rngs) -> list[ResidualBlock | Stack]:
    """Three groups of blocks; all but the first of a group are alike, and made together."""
    blocks: list[ResidualBlock | Stack] = []
    entering = inside = config.filters
    num_alike = config.num_blocks // NUM_GROUPS_OF_BLOCKS - 1
    for group in range(NUM_GROUPS_OF_BLOCKS):
        leaving = (2 if group else 4) * inside
        stride, activated = (2, True) if group else (1, False)
        channels = (entering, inside, leaving)
        blocks.append(ResidualBlock(config, channels, stride=stride, activated=activated, rngs=rngs))

        alike = _maker(config, (leaving, inside, leaving))
        keys = jax.random.split(rngs.params(), num_alike)
        if config.stack > 1:
            blocks += [Stack(alike, keys[i : i + config.stack]) for i in range(0, num_alike, config.stack)]
        else:
            stacked = jax.vmap(alike)(keys)
            blocks += [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_alike)]
        entering = inside = leaving
    return blocks


def _maker(config: ResNetConfig, channels: tuple[int, int, int]) -> Callable[[jax.Array], ResidualBlock]:
    """Return what makes a block that keeps the shape of its input, from the key of its parameters."""

    def make(key: jax.Array) -> ResidualBlock:
        return ResidualBlock(config, channels, stride=1, activated=True, rngs=nnx.Rngs(params=key))

    return make


def _norm(config: ResNetConfig, channels: int) -> ChannelNorm:
    return ChannelNorm(config.norm, channels, num_groups=config.num_groups, dtype=config.dtype)
