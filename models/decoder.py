"""A causal decoder of the GPT and Llama families in nnx: `DecoderConfig` is the factory, `Decoder` the model.

Blocks are stacked along the dim layers, whether they are scanned or unrolled, so both have the same
parameters. The model names dims and knows no mesh; `transformer.py` has its parts, `huggingface.py` loads
pretrained ones.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, LAYERS, MLP, SEQ, VOCAB
from shardtrain.functional.remat_policies import BLOCK_OUTPUT, REMAT_POLICIES
from shardtrain.models import checks
from shardtrain.models.layers import Attentions, Norms, at_use, coming_keys, normal, restarted_positions
from shardtrain.models.transformer import (
    STREAM,
    TABLE,
    Attention,
    FeedForward,
    linear_of,
    logits_of,
    norm_of,
    stacked_blocks,
    to_stream,
    too_long,
    walk,
    whole_seq,
)
from shardtrain.models.transformer_options import (
    Activations,
    Dtypes,
    Positions,
    Remats,
    block_sizes,
    problems,
)

__all__ = (
    "REMAT_POLICIES",
    "Attention",
    "Block",
    "Decoder",
    "DecoderConfig",
    "FeedForward",
    "block_sizes",
    "flops_per_token",
    "gpt2",
    "linear_of",
    "llama_small",
    "norm_of",
    "problems",
    "stacked_blocks",
    "to_stream",
    "too_long",
    "walk",
    "whole_seq",
)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder; called with `nnx.Rngs` it builds the model.

    Args:
      vocab: number of tokens in the vocabulary.
      seq: largest number of positions.
      embed: features of each position between blocks.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads (grouped-query attention); None: as many as `num_heads`.
      head_dim: features of each head; None: embed // num_heads.
      mlp: hidden features of the feed-forward; None: 4 * embed.
      positions: "learned", a table of embeddings; or "rotary", rotated queries and keys.
      theta: base of the rotary wavelengths.
      norm: kind of norm before each half of a block and before the head.
      eps: added to the variance in the norms.
      activation: "gelu" (tanh approximation, as GPT-2), "gelu_erf" (exact, as BERT) or "swiglu" (a second,
        gating projection).
      bias: whether projections and layer norms have biases (the head has none).
      tied: whether the head is the embedding table.
      dropout: rate on the embedding and on the outputs of attention and feed-forward, from the rng stream
        "dropout".
      remat: what the backward pass recomputes. "none": nothing. "weights": only casts and copies, so that no
        gathered weight is kept for it. "dots": all but matrix products. "outputs": all but the outputs of
        attention and feed-forward, which tensor parallelism reduces over devices. "full": all but the input
        of a block.
      scan: run the blocks in `jax.lax.scan` (compile time does not grow with their number), or unroll them
        (XLA on the CPU then merges away what remat repeats).
      dtype: compute dtype; parameters, norms, softmax and logits are float32.
      attention: "xla"; "cudnn", flash attention on NVIDIA GPUs; or "auto": "cudnn" where device, dtype and
        head_dim allow it, else "xla".
      loss_chunk: number of tokens of a device whose logits exist at the same time, in the loss and its
        gradient. None: all of them.
      lora: low-rank adapters of the blocks' projections, as "rank=8" or "rank=8,alpha=16,on=q+v"; then they
        alone are trained. Empty: none.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.

    >>> config = DecoderConfig(vocab=256, seq=32, embed=64, num_layers=2, num_heads=4)
    >>> config.sizes["head_dim"], config.sizes["mlp"]
    (16, 256)
    """

    vocab: int
    seq: int
    embed: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp: int | None = None
    positions: Positions = "learned"
    theta: float = 10_000.0
    norm: Norms = "layernorm"
    eps: float = 1e-5
    activation: Activations = "gelu"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    remat: Remats = "weights"
    scan: bool = True
    dtype: Dtypes = "float32"
    attention: Attentions = "auto"
    loss_chunk: int | None = None
    lora: str = ""

    def __post_init__(self):
        checks.refuse("DecoderConfig", problems(self))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name, with the defaults filled in."""
        return {LAYERS: self.num_layers, **block_sizes(self)}

    def __call__(self, rngs: nnx.Rngs) -> "Decoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Decoder(self, rngs=rngs)


Stream = jax.Array | dict[str, jax.Array]
"""The residual stream; or, of rows with several documents, "x" with it, and their "segments"."""


class Block(nnx.Module):
    """Pre-norm residual block. It has parameters only: the key of its dropout is an argument."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, x_BTD: jax.Array, key: jax.Array | None, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        # two halves, attention and feed-forward: norm, layer, dropout, sum
        attention = partial(self.attention, segments_BT=segments_BT)
        halves = (self.attention_norm, attention), (self.mlp_norm, self.mlp)
        for (norm, layer), dropout_key in zip(halves, keys, strict=True):
            h_BTD = layer(whole_seq(norm(x_BTD)))
            h_BTD = checkpoint_name(h_BTD, BLOCK_OUTPUT)
            x_BTD = with_logical_constraint(x_BTD + self.dropout(h_BTD, rngs=dropout_key), STREAM)
        return x_BTD


class Decoder(nnx.Module):
    """Token ids to logits. `nnx.view(decoder, deterministic=True)` is the same model with dropout off.

    A call is the composition of its parts: `first`, then `run` on `blocks` with `block_keys`, then `last`. A
    pipeline calls them one by one, in programs of their own, and `run` on shares of the blocks.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        # embeddings of tokens and, unless positions are rotary, of positions
        table = partial(normal, sizes=config.sizes, std=0.02, rngs=rngs)
        self.embedding = table(TABLE)
        self.positions = table((SEQ, EMBED)) if config.positions == "learned" else None
        # the blocks, and the head, which may be the embedding again
        self.blocks = stacked_blocks(Block, config, rngs)
        self.final_norm = norm_of(config)
        self.head = None if config.tied else linear_of(config, (EMBED,), (VOCAB,), rngs, bias=False)
        # a random stream of the model's own: each call draws other masks
        self.dropout = nnx.Dropout(config.dropout)
        self.rngs = rngs["dropout"].fork() if config.dropout else None

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """Predict the next token at every position.

        Args:
          tokens_BT: int token ids below `vocab`; T is at most `seq`. An id out of range gives NaN.
          segments_BT: int, the number of each token's document, where a row has several: a position sees its
            own document only, and positions begin again in each; by default a row is one.

        Returns:
          Logits (batch, seq, vocab), float32; with `loss_chunk` as `ChunkedLogits`.

        Raises:
          ValueError: if T is above `seq`.
        """
        logits_BTV = self.last(self.run(self.blocks, self.first(tokens_BT, segments_BT), self.block_keys()))
        if self._keys() is not None and self.rngs is not None:
            self.rngs()  # the next call has masks of its own
        return logits_BTV

    def first(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> Stream:
        """Look up tokens and positions: the residual stream (batch, seq, embed) that enters the blocks."""
        if tokens_BT.shape[1] > self.config.seq:
            raise ValueError(too_long(tokens_BT.shape[1], self.config.seq))
        x_BTD = jnp.take(at_use(self.embedding, TABLE, self.config.dtype), tokens_BT, axis=0)
        if self.positions is not None:
            table = at_use(self.positions, (SEQ, EMBED), self.config.dtype)
            if segments_BT is None:
                x_BTD += table[: tokens_BT.shape[1]]
            else:
                x_BTD += jnp.take(table, restarted_positions(segments_BT), axis=0)
        keys = self._keys()
        x_BTD = with_logical_constraint(x_BTD, STREAM)
        x_BTD = with_logical_constraint(self.dropout(x_BTD, rngs=None if keys is None else keys[0]), STREAM)
        return x_BTD if segments_BT is None else {"x": x_BTD, "segments": segments_BT}

    def block_keys(self) -> jax.Array | None:
        """The keys of the blocks' dropout, (num_layers,); None where it is off."""
        keys = self._keys()
        return None if keys is None else keys[1:]

    def _keys(self) -> jax.Array | None:
        """Return one key for the embedding and one for each block, the same within a call."""
        if self.rngs is None or self.dropout.deterministic:
            return None
        return coming_keys(self.rngs, self.config.num_layers + 1)

    def run(self, blocks: Block, stream: Stream, keys: jax.Array | None) -> Stream:
        """Apply stacked blocks to the residual stream (all, or those of a pipeline stage)."""
        segments_BT = stream["segments"] if isinstance(stream, dict) else None

        # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
        def run_block(block: Block, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
            return block(x_BTD, key, segments_BT)

        if isinstance(stream, dict):
            return {**stream, "x": walk(self.config, run_block, blocks, stream["x"], keys)}
        return walk(self.config, run_block, blocks, stream, keys)

    def last(self, stream: Stream) -> jax.Array:
        """Return the float32 logits, rounded to dtype: the normed residual stream times the vocabulary."""
        x_BTD = stream["x"] if isinstance(stream, dict) else stream
        return logits_of(self.config, whole_seq(self.final_norm(x_BTD)), self.head, self.embedding)


def flops_per_token(config: DecoderConfig) -> int:
    """Floating-point operations that training spends on one token, forward and backward: 6 N + 12 L H K T.

    N counts the weights of matrix products: the blocks' kernels and the head (tied or not), not the lookup
    table, nor norms and biases. L H K T are num_layers, num_heads, head_dim and seq; scores are counted in
    full, as is usual, though half of them are masked. Recomputation by remat is not counted, so this is what
    MFU divides by.

    Returns:
      Flops per token, with every sequence of length `seq`.

    References:
      Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311, appendix B.

    >>> flops_per_token(gpt2())
    854438400
    """
    size = config.sizes
    # query and output projections have all heads, keys and values those that they have
    heads_and_kv = 2 * size[HEADS] + 2 * size[KV_HEADS]
    num_projections = 3 if config.activation == "swiglu" else 2
    # the weights of matrix products in a block, and in all, with the head
    per_block = size[EMBED] * (heads_and_kv * size[HEAD_DIM] + num_projections * size[MLP])
    num_weights = size[LAYERS] * per_block + size[EMBED] * size[VOCAB]
    return 6 * num_weights + 12 * size[LAYERS] * size[HEADS] * size[HEAD_DIM] * size[SEQ]


def gpt2(**changes: Any) -> DecoderConfig:
    """GPT-2 small, 124 million parameters; pass vocab=50304 to split the vocabulary over devices."""
    config = DecoderConfig(vocab=50257, seq=1024, embed=768, num_layers=12, num_heads=12)
    return replace(config, **changes)


def llama_small(**changes: Any) -> DecoderConfig:
    """A Llama of GPT-2's size: rotary, root-mean-square norm, swiglu, grouped queries, no biases."""
    config = DecoderConfig(
        vocab=32_000, seq=2048, embed=768, num_layers=12, num_heads=12, num_kv_heads=4, mlp=2048,
        positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False,
    )  # fmt: skip
    return replace(config, **changes)
