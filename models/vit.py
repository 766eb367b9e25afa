"""A vision transformer in nnx: `VitConfig` is the factory, `Vit` the model; `vit` has the published sizes.

Patches of an image are a sequence, which goes through the blocks of `decoder_block.py` with bidirectional
attention. `transformer.py` has the parts that all transformers share.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, HEIGHT, SEQ, VOCAB, WIDTH
from shardtrain.models import checks
from shardtrain.models.attention import Attentions
from shardtrain.models.block_stack import stacked_blocks, walk
from shardtrain.models.convolution import check_images
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.decoder_block import Block
from shardtrain.models.layers import Linear, at_use, coming_keys, normal
from shardtrain.models.on_gpus import rows_last
from shardtrain.models.residual_stream import STREAM, whole_seq
from shardtrain.models.transformer import linear_of, norm_of
from shardtrain.models.transformer_options import RARE, Dtypes, Remats, problems

Poolings = Literal["token", "mean"]


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """Sizes and options of a vision transformer; called with `nnx.Rngs` it builds the model.

    Args:
      height: rows of an image, a multiple of `patch`.
      width: columns of an image, a multiple of `patch`.
      colours: channels of an image.
      classes: number of classes, the dim vocab.
      patch: rows and columns of a patch, which one linear map makes a position of the sequence.
      embed: features of each position between blocks.
      num_layers: number of blocks.
      num_heads: attention heads.
      mlp: hidden features of the feed-forward; None: 4 * embed.
      pooling: what is classified. "token": a class token before the patches, as in the paper. "mean": the
        mean of all patches, without such a token; then the number of positions is that of patches, which a
        mesh can divide.
      eps: added to the variance in the layer norms.
      activation: "gelu_erf" (exact) or "gelu" (tanh approximation).
      qkv_bias: whether the projections of queries, keys and values have biases, as all others.
      dropout: rate on the embedding and on the outputs of attention and feed-forward, from the rng stream
        "dropout".
      remat: what the backward pass recomputes. "none": nothing. "weights": only casts and copies, so that no
        gathered weight is kept for it. "dots": all but matrix products. "outputs": all but the outputs of
        attention and feed-forward, which tensor parallelism reduces over devices. "full": all but the input
        of a block. "offload": likewise, and that input waits in the memory of the host.
      scan: run the blocks in `jax.lax.scan` (compile time does not grow with their number), or unroll them.
      dtype: compute dtype; parameters, norms, softmax and logits are float32.
      attention: "xla"; "cudnn", flash attention on NVIDIA GPUs; or "auto": "cudnn" where device, dtype and
        head_dim allow it, else "xla".
      lora: low-rank adapters of the blocks' projections, as "rank=8" or "rank=8,alpha=16,on=q+v"; then they
        alone are trained. Empty: none.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.

    References:
      Dosovitskiy et al. 2020, An image is worth 16x16 words, https://arxiv.org/abs/2010.11929, section 3.1;
      the mean as in Beyer et al. 2022, https://arxiv.org/abs/2205.01580.

    >>> VitConfig(height=224, width=224, classes=1000).sizes["seq"]
    197
    """

    RARE: ClassVar = RARE

    height: int
    width: int
    colours: int = 3
    classes: int
    patch: int = 16
    embed: int = 768
    num_layers: int = 12
    num_heads: int = 12
    mlp: int | None = None
    pooling: Poolings = "token"
    eps: float = 1e-12
    activation: Literal["gelu", "gelu_erf"] = "gelu_erf"
    qkv_bias: bool = True
    dropout: float = 0.0
    remat: Remats = "weights"
    scan: bool = True
    dtype: Dtypes = "float32"
    attention: Attentions = "auto"
    lora: str = ""

    # what the checks of a transformer's options look at, and a vision transformer has no choice of
    num_kv_heads: ClassVar[int | None] = None
    head_dim: ClassVar[int | None] = None
    positions: ClassVar[str] = "learned"
    theta: ClassVar[float] = 10_000.0

    def __post_init__(self):
        checks.refuse("VitConfig", _problems(self))

    @property
    def vocab(self) -> int:
        """Number of classes, by the name that all transformers have for what they score."""
        return self.classes

    @property
    def seq(self) -> int:
        """Positions: the patches, and the class token if there is one."""
        return self.height // self.patch * (self.width // self.patch) + (self.pooling == "token")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name; height and width are those of a patch, its columns with colours."""
        return {**self.parts.sizes, HEIGHT: self.patch, WIDTH: self.patch * self.colours}

    @property
    def parts(self) -> DecoderConfig:
        """Options of the parts of a block."""
        shared = {f.name for f in fields(DecoderConfig)}
        options = {name: value for name, value in vars(self).items() if name in shared}
        return DecoderConfig(**options, vocab=self.vocab, seq=self.seq)

    def __call__(self, rngs: nnx.Rngs) -> "Vit":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Vit(self, rngs=rngs)


def _problems(config: VitConfig) -> list[str]:
    sides = {name: getattr(config, name) for name in ("height", "width")}
    if min(*sides.values(), config.patch) < 1:
        return checks.positive({**sides, "patch": config.patch})
    found = [
        problem
        for name, value in sides.items()
        for problem in checks.multiple(name, value, "patch", config.patch)
    ]
    return found + problems(config)


class Vit(nnx.Module):
    """Images to logits. `nnx.view(vit, deterministic=True)` is the same model with dropout off.

    A call is the composition of its parts: `first`, then `run` on `blocks` with `block_keys`, then `last`.
    """

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
        self.blocks = stacked_blocks(partial(Block, causal=False), parts, rngs)
        self.final_norm = norm_of(parts)
        self.head = linear_of(parts, (EMBED,), (VOCAB,), rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.rngs = rngs["dropout"].fork() if config.dropout else None

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
        if self._keys() is not None and self.rngs is not None:
            self.rngs()  # the next call has masks of its own
        return logits_BV

    def first(self, images: jax.Array) -> jax.Array:
        """Map each patch to a position, and add the positions' table: the stream that enters the blocks."""
        config = self.config
        check_images(images.shape, (config.height, config.width, config.colours))
        x_BTD = self.patches(split_patches(images.astype(config.dtype), config.patch))
        if self.token is not None:
            token_D = at_use(self.token, (EMBED,), config.dtype)
            tokens_B1D = jnp.broadcast_to(token_D, (x_BTD.shape[0], 1, config.embed))
            x_BTD = jnp.concatenate([tokens_B1D, x_BTD], axis=1)
        x_BTD = rows_last(x_BTD + at_use(self.positions, (SEQ, EMBED), config.dtype))
        x_BTD = with_logical_constraint(x_BTD, STREAM)
        keys = self._keys()
        return with_logical_constraint(self.dropout(x_BTD, rngs=None if keys is None else keys[0]), STREAM)

    def block_keys(self) -> jax.Array | None:
        """The keys of the blocks' dropout, (num_layers,); None where it is off."""
        keys = self._keys()
        return None if keys is None else keys[1:]

    def run(self, blocks: Block, x_BTD: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Apply stacked blocks to the residual stream (all, or those of a pipeline stage)."""

        # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
        def run_block(block: Block, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
            return block(x_BTD, key)

        return walk(self.config.parts, run_block, blocks, x_BTD, keys)

    def last(self, x_BTD: jax.Array) -> jax.Array:
        """Norm, pool and score: float32 logits (batch, classes), rounded to dtype."""
        x_BTD = whole_seq(self.final_norm(x_BTD))
        x_BD = x_BTD.mean(axis=1) if self.token is None else x_BTD[:, 0]
        logits_BV = self.head(with_logical_constraint(x_BD, (BATCH, EMBED)))
        return with_logical_constraint(logits_BV.astype(jnp.float32), (BATCH, VOCAB))

    def _keys(self) -> jax.Array | None:
        """Return one key for the embedding and one for each block, the same within a call."""
        if self.rngs is None or self.dropout.deterministic:
            return None
        return coming_keys(self.rngs, self.config.num_layers + 1)


def split_patches(images: jax.Array, patch: int) -> jax.Array:
    """Split images (batch, height, width, colours) into patches (batch, number, patch, patch * colours).

    Patches come row by row; in one, the colours of a pixel stand together.

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
    checks.refuse("vit", checks.choice("size", size, tuple(SIZES)))
    options: dict[str, Any] = SIZES[size]
    return replace(VitConfig(height=224, width=224, classes=1000, **options), **changes)
