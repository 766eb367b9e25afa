"""VGG-16 and VGG-19 for small images in nnx: `VggConfig` builds the model `Vgg`.

Each convolution, with its norm and relu, is a block of an `nnx.List`; the last block of a size also pools.
`convolution.py` has the parts.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, CHANNELS_IN, EMBED, MLP, VOCAB
from shardtrain.models import checks
from shardtrain.models.convolution import WRITTEN, Convolution, ImageModel, ImageOptions, make_channel_norm
from shardtrain.models.layers import Linear
from shardtrain.models.transformer import DropoutKeys

CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Depth -> number of convolutions at each image size; three more layers classify."""
CHANNELS = (1, 2, 4, 8, 8)
"""Number of channels at each image size, in multiples of `filters`."""
HALVED = 2 ** len(CHANNELS)


@dataclass(frozen=True, kw_only=True)
class VggConfig(ImageOptions):
    """Sizes and options of a VGG; called with `nnx.Rngs` it builds the model.

    Args:
      depth: number of layers, 16 (configuration D of the paper) or 19 (E).
      filters: number of channels of the first convolutions, 64 in the paper; the last have 8 times as many.
      height: rows of an image, a multiple of 32, as five poolings halve them.
      width: columns of an image, a multiple of 32.
      hidden: features of the two hidden layers of the classifier, 4096 in the paper. None removes these
        layers.
      dropout: dropout rate of the hidden features of the classifier, 0.5 in the paper. It needs a random
        stream "dropout".

    References:
      Simonyan and Zisserman 2014, https://arxiv.org/abs/1409.1556, table 1.

    >>> VggConfig(depth=19).num_blocks
    16
    """

    depth: int = 16
    filters: int = 64
    hidden: int | None = 512
    dropout: float = 0.0

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        found = super().list_problems() + checks.depth(self.depth, CONVOLUTIONS)
        for name in ("height", "width"):
            if getattr(self, name) > 0:
                found += checks.multiple(name, getattr(self, name), "2 ** poolings", HALVED)
        if self.dropout > 0 and self.hidden is None:
            uses = "Use dropout=0.0 or hidden=512."
            found.append(f"dropout is {self.dropout} and there are no hidden features. {uses}")
        return found

    @property
    def num_blocks(self) -> int:
        """Number of convolutions."""
        return sum(CONVOLUTIONS[self.depth])

    @property
    def outer_channels(self) -> int:
        """Number of channels after the last convolution."""
        return CHANNELS[-1] * self.filters

    def __call__(self, rngs: nnx.Rngs) -> "Vgg":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Vgg(self, rngs=rngs)


class VggBlock(nnx.Module):
    """A convolution, its norm and relu, and with `pooled` the maximum of each 2 x 2 pixels."""

    def __init__(
        self, config: VggConfig, entering: int, leaving: int, *, pooled: bool, of_image: bool, rngs: nnx.Rngs
    ):
        self.pooled = pooled
        self.convolution = Convolution(entering, leaving, 3, of_image=of_image, dtype=config.dtype, rngs=rngs)
        self.norm = make_channel_norm(config, leaving)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        x_BHWC = jax.nn.relu(self.norm(self.convolution(x_BHWC)))
        if self.pooled:
            x_BHWC = nnx.max_pool(x_BHWC, (2, 2), strides=(2, 2))
        return with_logical_constraint(x_BHWC, WRITTEN)


class Vgg(ImageModel, DropoutKeys):
    """Map images to logits; `nnx.view(vgg, deterministic=True, use_running_average=True)` for evaluation."""

    def __init__(self, config: VggConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.blocks = nnx.List(_make_blocks(config, rngs))
        self.classifier = nnx.List(_make_classifier(config, rngs))
        self.start_dropout(config.dropout, len(self.classifier) - 1, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Score each image against the classes; each call draws new dropout masks."""
        logits_BV = super().__call__(images)
        self.advance_dropout()
        return logits_BV

    def first(self, images: jax.Array) -> jax.Array:
        """Return the images in the compute dtype, as input of the first block."""
        return self.read_images(images)

    def last(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the logits: the classifier reads the mean over the remaining pixels."""
        x_B = x_BHWC.mean((1, 2))
        keys, dropped = self.dropout_keys(), len(self.classifier) - 1
        for i, linear in enumerate(self.classifier):
            x_B = with_logical_constraint(x_B, (BATCH, *linear.into))
            x_B = with_logical_constraint(linear(x_B), (BATCH, *linear.out))
            if i < dropped:
                x_B = self.dropout(jax.nn.relu(x_B), rngs=None if keys is None else keys[i])
        return x_B.astype(jnp.float32)


def _make_blocks(config: VggConfig, rngs: nnx.Rngs) -> list[VggBlock]:
    blocks = []
    entering = config.colours
    for multiple, count in zip(CHANNELS, CONVOLUTIONS[config.depth], strict=True):
        for i in range(count):
            leaving, pooled = multiple * config.filters, i == count - 1
            blocks.append(VggBlock(config, entering, leaving, pooled=pooled, of_image=not blocks, rngs=rngs))
            entering = leaving
    return blocks


def _make_classifier(config: VggConfig, rngs: nnx.Rngs) -> list[Linear]:
    """Make the linear maps from channels to classes; the hidden features after the first may be sharded."""
    sizes = {CHANNELS_IN: config.outer_channels, VOCAB: config.classes}
    dims = [((CHANNELS_IN,), (VOCAB,))]
    if config.hidden is not None:
        sizes |= {MLP: config.hidden, EMBED: config.hidden}
        dims = [((CHANNELS_IN,), (MLP,)), ((MLP,), (EMBED,)), ((EMBED,), (VOCAB,))]
    options: Any = {"sizes": sizes, "bias": True, "dtype": config.dtype, "rngs": rngs}
    return [Linear(into, out, std=(2 / sizes[into[0]]) ** 0.5, **options) for into, out in dims]
