"""Shared parts of the transformers: attention, feed-forward, embeddings, the head, and keys of dropout.

The activations between blocks are the residual stream (`residual_stream.py`). `layers.py` has the single
layers; `decoder.py` is the simplest model made of these parts.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import (
    BATCH,
    EMBED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MLP,
    SEQ,
    VOCAB,
)
from shardtrain.models.attention import attend
from shardtrain.models.chunked_logits import ChunkedLogits, cap
from shardtrain.models.layers import (
    Dims,
    Linear,
    Norm,
    add_bias,
    cast_and_constrain,
    lookup,
    peek_keys,
    restart_positions,
)
from shardtrain.models.ops import Ops, WithOps
from shardtrain.models.residual_stream import STREAM, project_to_stream, read_from_stream
from shardtrain.models.rotary import compute_block_frequencies, rotate
from shardtrain.models.transformer_options import (
    GATED,
    BlockOptions,
    TextOptions,
    TransformerOptions,
    has_bias,
)

TABLE = (VOCAB, EMBED)


def exact_gelu(x: jax.Array) -> jax.Array:
    """Compute the exact gelu, in float32 by erf, which costs half of jax's erfc.

    Below -5 its value is 0 to within 1e-6. In 16 bits, where erf near -1 has few digits, it is `jax.nn.gelu`.
    """
    if x.dtype != jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def apply_activation(ops: Ops, name: str, x: jax.Array) -> jax.Array:
    """Apply a configuration's activation to the hidden features, or to the features that gate them."""
    if name in ("gelu", "geglu"):
        return ops.tanh_gelu(x)
    return {"gelu_erf": exact_gelu, "relu": jax.nn.relu, "swiglu": jax.nn.silu}[name](x)


class DropoutKeys(WithOps):
    """A model with its own random stream, which gives its blocks the keys of their dropout.

    A call composes `first`, `run` on `blocks` with `block_keys`, and `last`; the dropout masks do not depend
    on the order in which they are called. Each call of the model draws new masks.
    """

    def start_dropout(self, rate: float, num_keys: int, rngs: nnx.Rngs) -> None:
        """Fork the stream "dropout" of `rngs`, for `num_keys` keys in each call, unless the rate is 0."""
        self.dropout, self.num_keys = nnx.Dropout(rate), num_keys
        self.rngs = rngs["dropout"].fork() if rate else None

    def dropout_keys(self) -> jax.Array | None:
        """Return the keys of a call: for the embedding, then for each block; None without dropout."""
        if self.rngs is None or self.dropout.deterministic:
            return None
        return peek_keys(self.rngs, self.num_keys)

    def embedding_key(self) -> jax.Array | None:
        """Return the key of the dropout before the blocks; None without dropout."""
        return None if (keys := self.dropout_keys()) is None else keys[0]

    def block_keys(self) -> Any:
        """Return the keys of the blocks' dropout, (blocks,); None without dropout."""
        return None if (keys := self.dropout_keys()) is None else keys[1:]

    def drop_embedding(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Apply dropout to the input of the first block."""
        return with_logical_constraint(self.dropout(with_logical_constraint(x_BTD, STREAM), rngs=key), STREAM)

    def advance_dropout(self) -> None:
        """Advance the random stream, so that the next call draws new masks."""
        if self.rngs is not None and not self.dropout.deterministic:
            self.rngs()


class Attention(WithOps):
    """Self-attention, causal or bidirectional, on the normed residual stream (batch, seq, embed)."""

    def __init__(self, config: BlockOptions, *, rngs: nnx.Rngs, causal: bool = True):
        self.config, self.causal = config, causal
        bias, bias_of_o = has_bias(config, "qkv_bias"), has_bias(config, "attention_bias")
        self.q = make_linear(config, (EMBED,), (HEADS, HEAD_DIM), rngs, bias=bias, name="q")
        self.k = make_linear(config, (EMBED,), (KV_HEADS, HEAD_DIM), rngs, bias=bias, name="k")
        self.v = make_linear(config, (EMBED,), (KV_HEADS, HEAD_DIM), rngs, bias=bias, name="v")
        self.o = make_linear(config, (HEADS, HEAD_DIM), (EMBED,), rngs, bias=bias_of_o, name="o")
        # over each head, or over all together
        of_heads = ((dim,) * config.qk_norm_joint + (HEAD_DIM,) for dim in (HEADS, KV_HEADS))
        self.q_norm, self.k_norm = (make_norm(config, *dims) if config.qk_norm else None for dims in of_heads)

    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BS: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        sees_all: jax.Array | None = None,
        cache: Any = None,
        bias_BHTS: jax.Array | None = None,
    ) -> jax.Array:
        """Attend to the keys of the same sequence.

        Args:
          x_BTD: the normed residual stream, from `read_by_products`.
          mask_BS: 0 for keys that no query sees.
          segments_BT: the number of each token's document.
          sees_all: with `full_every`, whether this block has no window, a bool scalar.
          cache: a `LayerCache` with the keys and values of earlier tokens.
          bias_BHTS: added to the scores.
        """
        # queries, keys and values; rotary positions rotate queries and keys, learned ones are already in x
        q_BTHK, k_BSHK, v_BSHK = self.project(x_BTD)
        if self.config.positions == "rotary":
            positions_BT = None if segments_BT is None else restart_positions(segments_BT)
            positions_BT = positions_BT if cache is None else cache.positions_BT
            num_positions = x_BTD.shape[1] if cache is None else cache.num_slots
            frequency_K, factor = compute_block_frequencies(self.config, sees_all, num_positions)
            q_BTHK, k_BSHK = (rotate(x, frequency_K, positions_BT, factor) for x in (q_BTHK, k_BSHK))
        # attention by heads, then back to the residual stream
        if cache is not None:
            # the keys of earlier tokens too, each at its position
            k_BSHK, v_BSHK = cache.add_tokens(k_BSHK, v_BSHK)
        window = self.config.window
        if window is not None and sees_all is not None:
            window = jnp.where(sees_all, k_BSHK.shape[1], window)
        seen = {"causal": self.causal, "mask_BS": mask_BS, "segments_BT": segments_BT, "window": window}
        seen["bias_BHTS"] = bias_BHTS
        if cache is not None:
            seen = {"causal": False, "mask_BS": cache.mask_BTS(window), "bias_BHTS": bias_BHTS}
        soft_cap = self.config.soft_cap
        y_BTHK = attend(self.ops, q_BTHK, k_BSHK, v_BSHK, self.config.attention, soft_cap=soft_cap, **seen)
        y_BTHK = with_logical_constraint(y_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM))
        return project_to_stream(self.ops, self.o, y_BTHK)

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries, keys and values by one product, so that devices reduce its gradient only once.

        Query heads are grouped with the key and value head that they share, and split over devices together.
        If `joins_heads` all heads are one group: queries, keys and values are concatenated in long pieces.
        """
        sizes = self.config.sizes
        num_groups = 1 if self.ops.joins_heads else sizes[KV_HEADS]
        # (embed, groups, heads of a group, head_dim): the queries of a group, then its keys and its values
        group = (num_groups, -1, sizes[HEAD_DIM])
        kernels = [linear.cast().reshape(sizes[EMBED], *group) for linear in (self.q, self.k, self.v)]
        kernel, dims = jnp.concatenate(kernels, 2), (EMBED, KV_HEADS, None, HEAD_DIM)
        y = read_from_stream(self.ops, x_BTD, kernel, dims, self.config.products)
        y = with_logical_constraint(y, (BATCH, SEQ, KV_HEADS, None, HEAD_DIM))
        # split queries, keys and values again, each with its own bias
        num_keys = kernels[1].shape[2]
        parts = jnp.split(y, [kernel.shape[2] - 2 * num_keys, kernel.shape[2] - num_keys], axis=3)
        q_BTHK, k_BSHK, v_BSHK = (
            linear.add_bias(linear.add_adapter(part.reshape(*x_BTD.shape[:2], -1, sizes[HEAD_DIM]), x_BTD))
            for linear, part in zip((self.q, self.k, self.v), parts, strict=True)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BSHK = self.q_norm(q_BTHK), self.k_norm(k_BSHK)
        return (
            self.scaled(q_BTHK),
            with_logical_constraint(k_BSHK, (BATCH, SEQ, KV_HEADS, HEAD_DIM)),
            with_logical_constraint(v_BSHK, (BATCH, SEQ, KV_HEADS, HEAD_DIM)),
        )

    def scaled(self, q_BTHK: jax.Array) -> jax.Array:
        """Scale queries for `query_scale`; attention divides by the root of head_dim."""
        if self.config.query_scale is not None:
            scale = self.config.query_scale * self.config.sizes[HEAD_DIM] ** 0.5
            q_BTHK *= jnp.asarray(scale, q_BTHK.dtype)
        return with_logical_constraint(q_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM))


class FeedForward(WithOps):
    """A feed-forward of two or three projections, from `read_by_products` back to the residual stream."""

    def __init__(self, config: BlockOptions, *, rngs: nnx.Rngs):
        self.activation = config.activation
        self.up = make_linear(config, (EMBED,), (MLP,), rngs, name="up")
        gated = config.activation in GATED
        self.gate = make_linear(config, (EMBED,), (MLP,), rngs, name="gate") if gated else None
        self.down = make_linear(config, (MLP,), (EMBED,), rngs, name="down")

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        # hidden features are split over devices, from here to the second projection
        if self.gate is None:
            y_BTF = read_from_stream(self.ops, x_BTD, self.up.cast(), (EMBED, MLP), self.up.products)
            y_BTF = with_logical_constraint(self.up.add_adapter(y_BTF, x_BTD), (BATCH, SEQ, MLP))
            h_BTF = self.ops.recompute(self._activate)(y_BTF, self.up.cast_bias())
        else:
            # one product for both, as for queries, keys and values
            kernel = jnp.stack([self.up.cast(), self.gate.cast()], 1)
            y = read_from_stream(self.ops, x_BTD, kernel, (EMBED, None, MLP), self.up.products)
            y = with_logical_constraint(y, (BATCH, SEQ, None, MLP))
            linears = self.up, self.gate
            if any(linear.lora for linear in linears):
                y = jnp.stack([linear.add_adapter(y[:, :, i], x_BTD) for i, linear in enumerate(linears)], 2)
            h_BTF = self.ops.recompute(self._gate)(y, *(linear.cast_bias() for linear in linears))
        return project_to_stream(self.ops, self.down, h_BTF)

    def _activate(self, y: jax.Array, bias: jax.Array | None) -> jax.Array:
        return apply_activation(self.ops, self.activation, add_bias(y, bias))

    def _gate(self, y: jax.Array, up_bias: jax.Array | None, gate_bias: jax.Array | None) -> jax.Array:
        gate = apply_activation(self.ops, self.activation, add_bias(y[:, :, 1], gate_bias))
        return add_bias(y[:, :, 0], up_bias) * gate


def compute_logits(
    config: BlockOptions,
    x_BTD: jax.Array,
    head: Linear | None,
    embedding: nnx.Param,
    bias: nnx.Param | None = None,
) -> Any:
    """Return the float32 logits, rounded to dtype: activations times the vocabulary.

    Args:
      config: the configuration, for `dtype`, `loss_chunk` and `logits_soft_cap`.
      x_BTD: the input of the head.
      head: a projection without bias; None means that the head is the embedding.
      embedding: the table of tokens.
      bias: (vocab,), added to the logits.

    Returns:
      Logits (batch, seq, vocab); with `loss_chunk` as `ChunkedLogits`, computed where they are read.
    """
    kernel, dims = (embedding, TABLE) if head is None else (head.kernel, (EMBED, VOCAB))
    kernel = cast_and_constrain(kernel, dims, config.dtype)
    bias_V = None if bias is None else cast_and_constrain(bias, (VOCAB,), config.dtype)
    if config.loss_chunk is not None:
        return ChunkedLogits(
            hidden_BTD=x_BTD, kernel=kernel, bias_V=bias_V, kernel_dims=dims, chunk=config.loss_chunk,
            soft_cap=config.logits_soft_cap,
        )  # fmt: skip
    logits_BTV = jnp.einsum("BTD,VD->BTV" if head is None else "BTD,DV->BTV", x_BTD, kernel)
    if bias_V is not None:
        logits_BTV += bias_V
    logits_BTV = cap(logits_BTV.astype(jnp.float32), config.logits_soft_cap)
    return with_logical_constraint(logits_BTV, (BATCH, SEQ, VOCAB))


def make_linear(
    config: BlockOptions, into: Dims, out: Dims, rngs: nnx.Rngs, *, bias: bool | None = None, name: str = ""
) -> Linear:
    """Make a projection initialised as in GPT-2, with smaller values if it writes to the residual stream.

    Projections of blocks have a name: they may have a low-rank adapter (`lora.py`) and products in 8 bits
    (`float8.py`).
    """
    # 2 * num_layers projections are added to the residual stream: their sum keeps its size
    std = 0.02 / math.sqrt(2 * config.num_layers) if out == (EMBED,) else 0.02
    bias = config.bias if bias is None else bias
    lora = config.lora
    return Linear(
        into, out, sizes=config.sizes, std=std, bias=bias, dtype=config.dtype, rngs=rngs,
        lora=lora if lora and name in lora.on else None, products=config.products if name else "",
    )  # fmt: skip


def make_norm(config: BlockOptions, *dims: str) -> Norm:
    """Make the norm over the last dims, by default over embed."""
    dims = dims or (EMBED,)
    sizes = [config.sizes[dim] for dim in dims]
    bias = has_bias(config, "norm_bias")
    return Norm(config.norm, *sizes, eps=config.eps, bias=bias, dtype=config.dtype, dims=dims)


def embed_tokens(config: TextOptions, embedding: nnx.Param, tokens_BT: jax.Array) -> jax.Array:
    """Look up tokens, (batch, seq, embed) in the compute dtype.

    Raises:
      ValueError: there are more tokens than positions.
    """
    if tokens_BT.shape[1] > config.seq:
        raise ValueError(describe_too_long(tokens_BT.shape[1], config.seq))
    return lookup(cast_and_constrain(embedding, TABLE, config.dtype), tokens_BT)


def add_positions(
    ops: Ops,
    config: TransformerOptions,
    x_BTD: jax.Array,
    table: nnx.Param | None,
    segments_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
) -> jax.Array:
    """Add the table's entries of the given positions; by default they count from 0, in each segment."""
    if table is None:
        return x_BTD
    table_SD = cast_and_constrain(table, (SEQ, EMBED), config.dtype)
    if positions_BT is None and segments_BT is not None:
        positions_BT = restart_positions(segments_BT)
    of_tokens = table_SD[: x_BTD.shape[1]] if positions_BT is None else lookup(table_SD, positions_BT)
    return ops.keep_last_contiguous(x_BTD + of_tokens)


def describe_too_long(num_tokens: int, seq: int) -> str:
    """Return the error message for more tokens than positions."""
    return (
        f"tokens of length {num_tokens} were given to a decoder of seq={seq} positions. "
        f"Give at most {seq} tokens, or build it with seq={num_tokens}."
    )
