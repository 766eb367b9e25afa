"""An encoder of the BERT family in nnx: `EncoderConfig` builds the model `Encoder`.

Its attention is bidirectional and every position gets logits over the vocabulary, for training on masked
tokens. Blocks are stacked as in `decoder.py`; `transformer.py` has the parts that both share.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, MLP, SEGMENTS, SEQ, VOCAB
from shardtrain.models.block_stack import stack_blocks, walk
from shardtrain.models.layers import Linear, cast_and_constrain, lookup, normal, parameter
from shardtrain.models.ops import WithOps
from shardtrain.models.residual_stream import STREAM, add_part, gather_sequence, read_by_products, split_key
from shardtrain.models.transformer import (
    TABLE,
    Attention,
    DropoutKeys,
    FeedForward,
    add_positions,
    compute_logits,
    embed_tokens,
    make_linear,
    make_norm,
)
from shardtrain.models.transformer_options import BlockOptions, TextOptions

Stream = dict[str, jax.Array]
"""Activations between blocks: "x" (batch, seq, embed), and "mask" (batch, seq) if one was given."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextOptions):
    """Sizes and options of an encoder; called with `nnx.Rngs` it builds the model.

    Args:
      num_layers: number of blocks.
      segments: number of token types (in BERT: first and second text).
      eps: added to the variance in the layer norms after each half of a block.
      activation: "gelu_erf" (exact, as BERT) or "gelu" (tanh approximation), in the blocks and in the head.
      scan: whether blocks run in `jax.lax.scan`, so that compile time does not grow with their number (up to
        8 blocks are plain code on one CPU); otherwise they are unrolled.

    References:
      Devlin et al. 2018, BERT, https://arxiv.org/abs/1810.04805, without the next-sentence task.

    >>> config = EncoderConfig(vocab=256, seq=32, embed=64, num_layers=2, num_heads=4)
    >>> config.sizes["head_dim"], config.sizes["mlp"], config.sizes["segments"]
    (16, 256, 2)
    """

    num_layers: int
    segments: int = 2
    eps: float = 1e-12
    activation: Literal["gelu", "gelu_erf"] = "gelu_erf"
    scan: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name, with the defaults filled in."""
        return {**super().sizes, SEGMENTS: self.segments}

    def __call__(self, rngs: nnx.Rngs) -> "Encoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Encoder(self, rngs=rngs)


class EncoderBlock(WithOps):
    """A post-norm residual block. It has only parameters: the key of its dropout is an argument."""

    def __init__(self, config: BlockOptions, *, rngs: nnx.Rngs):
        self.attention = Attention(config, causal=False, rngs=rngs)
        self.attention_norm = make_norm(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.mlp_norm = make_norm(config)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None, key: jax.Array | None) -> jax.Array:
        # attention sees no padding; the norm comes after each sum, as in BERT
        halves = (partial(self.attention, mask_BS=mask_BT), self.attention_norm), (self.mlp, self.mlp_norm)
        for (layer, norm), dropout_key in zip(halves, split_key(key, 2), strict=True):
            h_BTD = layer(read_by_products(self.ops, x_BTD))
            x_BTD = add_part(self.ops, x_BTD, h_BTD, self.dropout, dropout_key)
            x_BTD = with_logical_constraint(norm(x_BTD), STREAM)
        return x_BTD


class Encoder(DropoutKeys):
    """Map token ids to logits; `nnx.view(encoder, deterministic=True)` is the same model without dropout."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        parts, sizes = config.parts, config.sizes
        table = partial(normal, sizes=sizes, std=0.02, rngs=rngs)
        self.embedding = table(TABLE)
        self.positions = table((SEQ, EMBED))
        self.segments = table((SEGMENTS, EMBED))
        self.embedding_norm = make_norm(parts)
        self.blocks = stack_blocks(EncoderBlock, parts, rngs)
        # square; its output is split over devices like the hidden features of a feed-forward
        self.transform = Linear(
            (EMBED,), (MLP,), sizes={**sizes, MLP: config.embed}, std=0.02, bias=True, dtype=config.dtype,
            rngs=rngs,
        )  # fmt: skip
        self.transform_norm = make_norm(parts)
        self.head = None if config.tied else make_linear(parts, (EMBED,), (VOCAB,), rngs, bias=False)
        self.head_bias = parameter(jnp.zeros(config.vocab), (VOCAB,))
        self.start_dropout(config.dropout, 1 + config.num_layers, rngs)

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
        self.advance_dropout()
        return logits_BTV

    def first(
        self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None, segments_BT: jax.Array | None = None
    ) -> Stream:
        """Look up tokens, positions and segments, and norm their sum, as input of the first block."""
        # the sum of three embeddings: of the token, its position and its segment
        x_BTD = embed_tokens(self.config, self.embedding, tokens_BT)
        x_BTD = add_positions(self.ops, self.config, x_BTD, self.positions)
        segments = cast_and_constrain(self.segments, (SEGMENTS, EMBED), self.config.dtype)
        x_BTD += segments[0] if segments_BT is None else lookup(segments, segments_BT)
        x_BTD = self.embedding_norm(with_logical_constraint(x_BTD, STREAM))
        stream = {"x": self.drop_embedding(x_BTD, self.embedding_key())}
        return stream if mask_BT is None else {**stream, "mask": mask_BT}

    def run(self, blocks: EncoderBlock, stream: Stream, keys: jax.Array | None) -> Stream:
        """Apply stacked blocks to the activations: all blocks, or those of a pipeline stage."""
        mask_BT = stream.get("mask")

        def run_block(block: EncoderBlock, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
            return block(x_BTD, mask_BT, key)

        return {**stream, "x": walk(self.ops, self.config.parts, run_block, blocks, stream["x"], keys)}

    def last(self, stream: Stream) -> jax.Array:
        """Return the float32 logits, rounded to dtype, from the transformed activations."""
        # the head of masked tokens: a projection, gelu and norm before the vocabulary
        h_BTD = with_logical_constraint(self.transform(gather_sequence(stream["x"])), (BATCH, SEQ, MLP))
        h_BTD = jax.nn.gelu(h_BTD, approximate=self.config.activation == "gelu")
        h_BTD = self.transform_norm(with_logical_constraint(h_BTD, (BATCH, SEQ, EMBED)))
        return compute_logits(self.config.parts, h_BTD, self.head, self.embedding, self.head_bias)
