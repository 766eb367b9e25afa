"""An encoder of the BERT family in nnx: `EncoderConfig` is the factory, `Encoder` the model.

Its attention is bidirectional and every position gets logits over the vocabulary, for training on masked
tokens. Blocks are stacked as in `decoder.py`; `transformer.py` has the parts that both share.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from shardtrain.axes import BATCH, EMBED, MLP, SEGMENTS, SEQ, VOCAB
from shardtrain.functional.remat_policies import BLOCK_OUTPUT
from shardtrain.models import checks
from shardtrain.models.attention import Attentions
from shardtrain.models.block_stack import stacked_blocks, walk
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.float8 import Products
from shardtrain.models.layers import Linear, at_use, coming_keys, looked_up, normal, parameter
from shardtrain.models.on_gpus import rows_last
from shardtrain.models.residual_stream import STREAM, added, read_by_products, whole_seq
from shardtrain.models.transformer import (
    TABLE,
    Attention,
    FeedForward,
    linear_of,
    logits_of,
    norm_of,
    too_long,
)
from shardtrain.models.transformer_options import RARE, BlockOptions, Dtypes, Remats, problems

Stream = dict[str, jax.Array]
"""Activations between blocks: "x" (batch, seq, embed), and "mask" (batch, seq) if one was given."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and options of an encoder; called with `nnx.Rngs` it builds the model.

    Args:
      vocab: number of tokens in the vocabulary.
      seq: largest number of positions; their table is learned.
      embed: features of each position between blocks.
      num_layers: number of blocks.
      num_heads: attention heads.
      mlp: hidden features of the feed-forward; None: 4 * embed.
      segments: number of token types (of BERT: first and second text).
      eps: added to the variance in the layer norms after each half of a block.
      activation: "gelu_erf" (exact, as BERT) or "gelu" (tanh approximation), in the blocks and in the head.
      tied: whether the head ends in the embedding table.
      dropout: rate on the embedding and on the outputs of attention and feed-forward, from the rng stream
        "dropout".
      remat: what the backward pass recomputes. "none": nothing. "weights": only casts and copies, so that no
        gathered weight is kept for it. "dots": all but matrix products. "outputs": all but the outputs of
        attention and feed-forward, which tensor parallelism reduces over devices. "full": all but the input
        of a block. "offload": likewise, and that input waits in the memory of the host.
      scan: run the blocks in `jax.lax.scan` (compile time does not grow with their number; up to 8 are plain
        code on one CPU), or unroll them.
      dtype: compute dtype; parameters, norms, softmax and logits are float32.
      attention: "xla"; "cudnn", flash attention on NVIDIA GPUs; or "auto": "cudnn" where device, dtype and
        head_dim allow it, else "xla".
      loss_chunk: number of tokens of a device whose logits exist at the same time, in the loss and its
        gradient. None: all of them.
      lora: low-rank adapters of the blocks' projections, as "rank=8" or "rank=8,alpha=16,on=q+v"; then they
        alone are trained. Empty: none.
      products: "float8": the blocks' matrix products with operands rounded to 8 bits, for NVIDIA GPUs from
        Ada on; the gradients of kernels, attention and the head stay in `dtype`. Empty: all in `dtype`.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.

    References:
      Devlin et al. 2018, BERT, https://arxiv.org/abs/1810.04805, without the next-sentence task.

    >>> config = EncoderConfig(vocab=256, seq=32, embed=64, num_layers=2, num_heads=4)
    >>> config.sizes["head_dim"], config.sizes["mlp"], config.sizes["segments"]
    (16, 256, 2)
    """

    RARE: ClassVar = RARE

    vocab: int
    seq: int
    embed: int
    num_layers: int
    num_heads: int
    mlp: int | None = None
    segments: int = 2
    eps: float = 1e-12
    activation: Literal["gelu", "gelu_erf"] = "gelu_erf"
    tied: bool = True
    dropout: float = 0.0
    remat: Remats = "weights"
    scan: bool = True
    dtype: Dtypes = "float32"
    attention: Attentions = "auto"
    loss_chunk: int | None = None
    lora: str = ""
    products: Products = ""

    # what `DecoderConfig` lets one choose and this family does not
    num_kv_heads: ClassVar[int | None] = None
    head_dim: ClassVar[int | None] = None
    positions: ClassVar[str] = "learned"
    theta: ClassVar[float] = 10_000.0

    def __post_init__(self):
        checks.refuse("EncoderConfig", problems(self))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name, with the defaults filled in."""
        return {**self.parts.sizes, SEGMENTS: self.segments}

    @property
    def parts(self) -> DecoderConfig:
        """Options of the parts of a block."""
        return DecoderConfig(**{name: value for name, value in vars(self).items() if name != "segments"})

    def __call__(self, rngs: nnx.Rngs) -> "Encoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Encoder(self, rngs=rngs)


class EncoderBlock(nnx.Module):
    """Post-norm residual block. It has parameters only: the key of its dropout is an argument."""

    def __init__(self, config: BlockOptions, *, rngs: nnx.Rngs):
        self.attention = Attention(config, causal=False, rngs=rngs)
        self.attention_norm = norm_of(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        attention = partial(self.attention, mask_BS=mask_BT)
        halves = (attention, self.attention_norm), (self.mlp, self.mlp_norm)
        # attention sees no padding; the norm comes after each sum, as in BERT
        for (layer, norm), dropout_key in zip(halves, keys, strict=True):
            h_BTD = checkpoint_name(layer(read_by_products(x_BTD)), BLOCK_OUTPUT)
            x_BTD = added(x_BTD, self.dropout(h_BTD, rngs=dropout_key))
            x_BTD = with_logical_constraint(norm(x_BTD), STREAM)
        return x_BTD


class Encoder(nnx.Module):
    """Token ids to logits. `nnx.view(encoder, deterministic=True)` is the same model with dropout off.

    A call is the composition of its parts: `first`, then `run` on `blocks` with `block_keys`, then `last`.
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        parts, sizes = config.parts, config.sizes
        table = partial(normal, sizes=sizes, std=0.02, rngs=rngs)
        self.embedding = table(TABLE)
        self.positions = table((SEQ, EMBED))
        self.segments = table((SEGMENTS, EMBED))
        self.embedding_norm = norm_of(parts)
        self.blocks = stacked_blocks(EncoderBlock, parts, rngs)
        # square; what it writes is split over devices as the hidden features of a feed-forward are
        self.transform = Linear(
            (EMBED,), (MLP,), sizes={**sizes, MLP: config.embed}, std=0.02, bias=True, dtype=config.dtype,
            rngs=rngs,
        )  # fmt: skip
        self.transform_norm = norm_of(parts)
        self.head = None if config.tied else linear_of(parts, (EMBED,), (VOCAB,), rngs, bias=False)
        self.head_bias = parameter(jnp.zeros(config.vocab), (VOCAB,))
        self.dropout = nnx.Dropout(config.dropout)
        self.rngs = rngs["dropout"].fork() if config.dropout else None

    def __call__(
        self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        """Score every position against the vocabulary.

        Args:
          tokens_BT: int token ids below `vocab`; T is at most `seq`. An id out of range gives NaN.
          mask_BT: 0 for padding, which no position sees; by default there is none.
          segments_BT: int, below `segments`; by default 0.

        Returns:
          Logits (batch, seq, vocab), float32.

        Raises:
          ValueError: if T is above `seq`.
        """
        stream = self.first(tokens_BT, mask_BT, segments_BT)
        logits_BTV = self.last(self.run(self.blocks, stream, self.block_keys()))
        if self._keys() is not None and self.rngs is not None:
            self.rngs()  # the next call has masks of its own
        return logits_BTV

    def first(
        self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None, segments_BT: jax.Array | None = None
    ) -> Stream:
        """Look up tokens, positions and segments, and norm their sum: the stream that enters the blocks."""
        if tokens_BT.shape[1] > self.config.seq:
            raise ValueError(too_long(tokens_BT.shape[1], self.config.seq))
        dtype = self.config.dtype
        # the sum of three embeddings: of the token, its position and its segment
        x_BTD = looked_up(at_use(self.embedding, TABLE, dtype), tokens_BT)
        x_BTD = rows_last(x_BTD + at_use(self.positions, (SEQ, EMBED), dtype)[: tokens_BT.shape[1]])
        segments = at_use(self.segments, (SEGMENTS, EMBED), dtype)
        x_BTD += segments[0] if segments_BT is None else looked_up(segments, segments_BT)
        x_BTD = with_logical_constraint(self.embedding_norm(with_logical_constraint(x_BTD, STREAM)), STREAM)
        keys = self._keys()
        x_BTD = self.dropout(x_BTD, rngs=None if keys is None else keys[0])
        stream = {"x": with_logical_constraint(x_BTD, STREAM)}
        return stream if mask_BT is None else {**stream, "mask": mask_BT}

    def block_keys(self) -> jax.Array | None:
        """The keys of the blocks' dropout, (num_layers,); None where it is off."""
        keys = self._keys()
        return None if keys is None else keys[1:]

    def run(self, blocks: EncoderBlock, stream: Stream, keys: jax.Array | None) -> Stream:
        """Apply stacked blocks to the activations (all, or those of a pipeline stage)."""
        mask_BT = stream.get("mask")

        def run_block(block: EncoderBlock, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
            return block(x_BTD, mask_BT, key)

        return {**stream, "x": walk(self.config.parts, run_block, blocks, stream["x"], keys)}

    def last(self, stream: Stream) -> jax.Array:
        """Return the float32 logits, rounded to dtype: the transformed activations times the vocabulary."""
        # the head of masked tokens: a projection, gelu and norm before the vocabulary
        h_BTD = with_logical_constraint(self.transform(whole_seq(stream["x"])), (BATCH, SEQ, MLP))
        h_BTD = jax.nn.gelu(h_BTD, approximate=self.config.activation == "gelu")
        h_BTD = self.transform_norm(with_logical_constraint(h_BTD, (BATCH, SEQ, EMBED)))
        return logits_of(self.config.parts, h_BTD, self.head, self.embedding, self.head_bias)

    def _keys(self) -> jax.Array | None:
        """Return one key for the embedding and one for each block, the same within a call."""
        if self.rngs is None or self.dropout.deterministic:
            return None
        return coming_keys(self.rngs, self.config.num_layers + 1)


def bert_base(**changes: Any) -> EncoderConfig:
    """BERT base, 110 million parameters; pass vocab=30592 to split the vocabulary over devices."""
    return replace(EncoderConfig(vocab=30522, seq=512, embed=768, num_layers=12, num_heads=12), **changes)
