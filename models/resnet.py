"""Residual networks of pre-activation bottleneck blocks (ResNet-v2) for small images in nnx.

`ResNetConfig` builds the model `ResNet`. Its blocks are an `nnx.List`, as they differ in shape; equal blocks
may be stored in stacks. `convolution.py` has the parts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.models.convolution import (
    WRITTEN,
    Convolution,
    ImageModel,
    ImageOptions,
    Stack,
    make_channel_norm,
)

NUM_GROUPS_OF_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ImageOptions):
    """Sizes and options of a ResNet; called with `nnx.Rngs` it builds the model.

    A block has 1x1, 3x3 and 1x1 convolutions, each after a norm and a relu. There are three groups of n
    blocks: inner channels are 1, 4 and 8 times `filters`, outer channels 4, 8 and 16 times; the second and
      third group
    halve the image. These are the widths of Keras' CIFAR example, which HyPar-Flow uses; in the paper the
    inner channels are 1, 2 and 4 times.

    Args:
      depth: number of layers, 9 n + 2: 20, 110 (n = 12), 1001 (n = 111).
      filters: number of channels of the first convolution; 16 for CIFAR, 4 for a narrow network.
      scan: whether equal blocks run in `jax.lax.scan`; otherwise they are unrolled (at 1001 layers compiling
        then takes ten times as long).
      stack: number of equal blocks that are stored as one, in arrays with a first dim layers; 1 stores each
        alone. Results stay the same, and the programs of a deep network become smaller. A pipeline cuts
        between stacks: 11 makes 33 stacks of the 333 blocks of 1001 layers. A checkpoint loads only with the
          same stack.

    References:
      He et al. 2016, Identity mappings in deep residual networks, https://arxiv.org/abs/1603.05027, figure 4e
      and section 4; Awan et al. 2020, HyPar-Flow, https://arxiv.org/abs/1911.05146.

    >>> ResNetConfig(depth=1001, filters=4, classes=10).num_blocks
    333
    """

    depth: int = 20
    filters: int = 16
    scan: bool = True
    stack: int = 1

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        found = super().list_problems()
        if self.depth > 0 and (self.depth < 11 or (self.depth - 2) % 9):
            n = max(1, (self.depth - 2) // 9)
            uses = f"Use depth={9 * n + 2} or depth={9 * n + 11}."
            found.append(f"depth is {self.depth}; it must be 9 n + 2. {uses}")
        return found

    @property
    def num_blocks(self) -> int:
        """Number of residual blocks, in three groups of equal length."""
        return (self.depth - 2) // 9 * NUM_GROUPS_OF_BLOCKS

    @property
    def outer_channels(self) -> int:
        """Number of channels after the last block."""
        return 16 * self.filters

    def __call__(self, rngs: nnx.Rngs) -> "ResNet":
        """Build the model; `rngs` needs the stream "params"."""
        return ResNet(self, rngs=rngs)


class ResidualBlock(nnx.Module):
    """A bottleneck that is added to its input, or to a 1x1 convolution of it if the shape changes.

    Args:
      channels: numbers of channels of the input, inside, and of the output.
      stride: the stride of the first convolution.
      activated: whether a norm and a relu come first; they do not in the very first block, which follows a
        norm and a relu.
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
        self.norms = nnx.List(
            [make_channel_norm(config, n) for n in (entering, inside, inside)[not activated :]]
        )
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
        # pre-activation: norm and relu come before each convolution except the first of the first block
        skipped = len(self.convolutions) - len(self.norms)
        for i, convolution in enumerate(self.convolutions):
            if i >= skipped:
                y_BHWC = jax.nn.relu(self.norms[i - skipped](y_BHWC))
            y_BHWC = convolution(y_BHWC)
        x_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        return with_logical_constraint(x_BHWC + y_BHWC, WRITTEN)


class ResNet(ImageModel):
    """Map images to logits; `nnx.view(resnet, use_running_average=True)` for evaluation."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = Convolution(
            config.colours, config.filters, 3, of_image=True, dtype=config.dtype, rngs=rngs
        )
        self.stem_norm = make_channel_norm(config, config.filters)
        self.blocks = nnx.List(_make_blocks(config, rngs))
        self.final_norm = make_channel_norm(config, config.outer_channels)
        self.head = self.make_head(config.outer_channels, (2 / config.outer_channels) ** 0.5, rngs)

    def first(self, images: jax.Array) -> jax.Array:
        """Apply the first convolution, its norm and relu: (batch, height, width, channels)."""
        return jax.nn.relu(self.stem_norm(self.stem(self.read_images(images))))

    def last(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the logits: norm, relu, mean over the pixels, and a linear map."""
        return self.score(self.head, jax.nn.relu(self.final_norm(x_BHWC)).mean((1, 2)))


def _make_blocks(config: ResNetConfig, rngs: nnx.Rngs) -> list[ResidualBlock | Stack]:
    """Make three groups of blocks; all blocks of a group but the first are equal, and made together."""
    blocks: list[ResidualBlock | Stack] = []
    entering = inside = config.filters
    num_alike = config.num_blocks // NUM_GROUPS_OF_BLOCKS - 1
    for group in range(NUM_GROUPS_OF_BLOCKS):
        leaving = (2 if group else 4) * inside
        stride, activated = (2, True) if group else (1, False)
        channels = (entering, inside, leaving)
        blocks.append(ResidualBlock(config, channels, stride=stride, activated=activated, rngs=rngs))

        alike = _make_factory(config, (leaving, inside, leaving))
        keys = jax.random.split(rngs.params(), num_alike)
        if config.stack > 1:
            blocks += [Stack(alike, keys[i : i + config.stack]) for i in range(0, num_alike, config.stack)]
        else:
            stacked = jax.vmap(alike)(keys)
            blocks += [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_alike)]
        entering = inside = leaving
    return blocks


def _make_factory(
    config: ResNetConfig, channels: tuple[int, int, int]
) -> Callable[[jax.Array], ResidualBlock]:
    """Return a function: key of the parameters -> a block that keeps the shape of its input."""

    def make(key: jax.Array) -> ResidualBlock:
        return ResidualBlock(config, channels, stride=1, activated=True, rngs=nnx.Rngs(params=key))

    return make
