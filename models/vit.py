"""A vision transformer in nnx: `VitConfig` builds the model `Vit`; `vit` has the published sizes.

The patches of an image are a sequence, which passes the blocks of `decoder_block.py` with bidirectional
attention. `transformer.py` has the parts that all transformers share.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, HEIGHT, SEQ, VOCAB, WIDTH
from shardtrain.errors.messages import refuse
from shardtrain.models import checks
from shardtrain.models.block_stack import stack_blocks, walk
from shardtrain.models.convolution import check_images
from shardtrain.models.decoder_block import Block
from shardtrain.models.layers import Linear, cast_and_constrain, normal
from shardtrain.models.residual_stream import gather_sequence
from shardtrain.models.transformer import DropoutKeys, add_positions, make_linear, make_norm
from shardtrain.models.transformer_options import BlockOptions, TransformerOptions

Poolings = Literal["token", "mean"]


@dataclass(frozen=True, kw_only=True)
class VitConfig(TransformerOptions):
    """Sizes and options of a vision transformer; called with `nnx.Rngs` it builds the model.

    Args:
      height: rows of an image, a multiple of `patch`.
      width: columns of an image, a multiple of `patch`.
      colours: channels of an image.
      classes: number of classes, the dim vocab.
      patch: rows and columns of a patch, which a linear map turns into a position of the sequence.
      num_layers: number of blocks.
      pooling: "token" classifies a class token before the patches, as in the paper. "mean" classifies the
        mean of all patches, without a class token, so that a mesh can divide the number of positions.
      eps: added to the variance in the layer norms.
      activation: "gelu_erf" (exact) or "gelu" (tanh approximation).
      qkv_bias: whether the projections to queries, keys and values have biases; all others have.
      scan: whether blocks run in `jax.lax.scan`, so that compile time does not grow with their number;
        otherwise they are unrolled.

    References:
      Dosovitskiy et al. 2020, An image is worth 16x16 words, https://arxiv.org/abs/2010.11929, section 3.1;
      the mean as in Beyer et al. 2022, https://arxiv.org/abs/2205.01580.

    >>> VitConfig(height=224, width=224, classes=1000).sizes["seq"]
    197
    """

    height: int
    width: int
    colours: int = 3
    classes: int
    patch: int = 16
    embed: int = 768
    num_layers: int = 12
    num_heads: int = 12
    pooling: Poolings = "token"
    eps: float = 1e-12
    activation: Literal["gelu", "gelu_erf"] = "gelu_erf"
    qkv_bias: bool = True
    scan: bool = True

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        sides = {"height": self.height, "width": self.width}
        if min(*sides.values(), self.patch) < 1:
            return checks.positive({**sides, "patch": self.patch})
        found = [
            problem
            for name, value in sides.items()
            for problem in checks.multiple(name, value, "patch", self.patch)
        ]
        return found + super().list_problems()

    @property
    def vocab(self) -> int:
        """Number of classes, by the name that all transformers use."""
        return self.classes

    @property
    def seq(self) -> int:
        """Positions: the patches, and the class token if there is one."""
        return self.height // self.patch * (self.width // self.patch) + (self.pooling == "token")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name; height and width are those of a patch, its columns with colours."""
        return {**super().sizes, HEIGHT: self.patch, WIDTH: self.patch * self.colours}

    @property
    def parts(self) -> BlockOptions:
        """Options of the parts of a block."""
        return self.block_options(vocab=self.vocab, seq=self.seq)

    def __call__(self, rngs: nnx.Rngs) -> "Vit":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Vit(self, rngs=rngs)


class Vit(DropoutKeys):
    """Map images to logits; `nnx.view(vit, deterministic=True)` is the same model without dropout."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        parts, sizes = config.parts, config.sizes
        # patches keep their variance; positions and the class token are small, as in the transformers of text
        self.patches = Linear(
            (HEIGHT, WIDTH), (EMBED,), sizes=sizes, std=(sizes[HEIGHT] * sizes[WIDTH]) ** -0.5, bias=True,
            dtype=config.dtype, rngs=rngs,
        )  # fmt: skip
        self.token = normal((EMBED,), sizes=sizes, std=0.02, rngs=rngs) if config.pooling == "token" else None
        self.positions = normal((SEQ, EMBED), sizes=sizes, std=0.02, rngs=rngs)
        self.blocks = stack_blocks(partial(Block, causal=False), parts, rngs)
        self.final_norm = make_norm(parts)
        self.head = make_linear(parts, (EMBED,), (VOCAB,), rngs)
        self.start_dropout(config.dropout, 1 + config.num_layers, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Score each image against the classes.

        Args:
          images: float (batch, height, width, colours).

        Returns:
          Logits (batch, classes), float32.

        Raises:
          ValueError: if the images are of another size than the model's.
        """
        logits_BV = self.last(self.run(self.blocks, self.first(images), self.block_keys()))
        self.advance_dropout()
        return logits_BV

    def first(self, images: jax.Array) -> jax.Array:
        """Map each patch to a position, and add the table of positions, as input of the first block."""
        config = self.config
        check_images(images.shape, (config.height, config.width, config.colours))
        x_BTD = self.patches(split_patches(images.astype(config.dtype), config.patch))
        if self.token is not None:
            token_D = cast_and_constrain(self.token, (EMBED,), config.dtype)
            tokens_B1D = jnp.broadcast_to(token_D, (x_BTD.shape[0], 1, config.embed))
            x_BTD = jnp.concatenate([tokens_B1D, x_BTD], axis=1)
        x_BTD = add_positions(self.ops, config, x_BTD, self.positions)
        return self.drop_embedding(x_BTD, self.embedding_key())

    def run(self, blocks: Block, x_BTD: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Apply stacked blocks to the residual stream: all blocks, or those of a pipeline stage."""

        # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
        def run_block(block: Block, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
            return block(x_BTD, key)

        return walk(self.ops, self.config.parts, run_block, blocks, x_BTD, keys)

    def last(self, x_BTD: jax.Array) -> jax.Array:
        """Norm and pool; return the float32 logits (batch, classes), rounded to dtype."""
        x_BTD = gather_sequence(self.final_norm(x_BTD))
        x_BD = x_BTD.mean(axis=1) if self.token is None else x_BTD[:, 0]
        logits_BV = self.head(with_logical_constraint(x_BD, (BATCH, EMBED)))
        return with_logical_constraint(logits_BV.astype(jnp.float32), (BATCH, VOCAB))


def split_patches(images: jax.Array, patch: int) -> jax.Array:
    """Split images (batch, height, width, colours) into patches (batch, number, patch, patch * colours).

    Patches come row by row; in a patch, the colours of a pixel are neighbours.

    >>> split_patches(jnp.arange(16).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
    [[2, 3], [6, 7]]
    """
    batch, height, width, colours = images.shape
    rows = images.reshape(batch, height // patch, patch, width // patch, patch * colours)
    return rows.swapaxes(2, 3).reshape(batch, -1, patch, patch * colours)


SIZES = {
    "tiny": {"embed": 192, "num_layers": 12, "num_heads": 3},
    "small": {"embed": 384, "num_layers": 12, "num_heads": 6},
    "base": {"embed": 768, "num_layers": 12, "num_heads": 12},
    "large": {"embed": 1024, "num_layers": 24, "num_heads": 16},
    "huge": {"embed": 1280, "num_layers": 32, "num_heads": 16, "patch": 14},
}
"""Published sizes: Dosovitskiy et al., table 1; tiny and small of Touvron et al. 2020,
https://arxiv.org/abs/2012.12877, table 1."""


def vit(size: Literal["tiny", "small", "base", "large", "huge"], **changes: Any) -> VitConfig:
    """Return a vision transformer of a published size, for 1,000 classes and images of 224 x 224.

    Raises:
      ValueError: there is no such size.

    >>> vit("small", classes=10).embed
    384
    """
    refuse("vit", checks.choice("size", size, tuple(SIZES)))
    options: dict[str, Any] = SIZES[size]
    return replace(VitConfig(height=224, width=224, classes=1000, **options), **changes)
