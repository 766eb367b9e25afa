"""The blocks of the encoder-decoder: self-attention, attention to the encoded source, feed-forward.

The activations between blocks are a dict with the entries source and target. The model of these blocks is in
`encoder_decoder.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from shardtrain.axes import BATCH, EMBED, HEAD_DIM, HEADS, KV_HEADS, SEQ
from shardtrain.functional.remat_policies import BLOCK_OUTPUT, REMAT_POLICIES
from shardtrain.models.layers import attend
from shardtrain.models.transformer import (
    STREAM,
    Attention,
    FeedForward,
    linear_of,
    norm_of,
    to_stream,
    whole_seq,
)
from shardtrain.models.transformer_options import BlockOptions, Remats

Stream = dict[str, jax.Array]
"""The residual streams (batch, seq, embed) of "source" and of "target"; the last block drops the source."""


class CrossAttention(nnx.Module):
    """Attention of the normed target stream to the encoded source, back to the target's residual stream."""

    def __init__(self, config: BlockOptions, *, rngs: nnx.Rngs):
        self.config = config
        self.q = linear_of(config, (EMBED,), (HEADS, HEAD_DIM), rngs, name="q")
        self.k = linear_of(config, (EMBED,), (KV_HEADS, HEAD_DIM), rngs, name="k")
        self.v = linear_of(config, (EMBED,), (KV_HEADS, HEAD_DIM), rngs, name="v")
        self.o = linear_of(config, (HEADS, HEAD_DIM), (EMBED,), rngs, name="o")

    def __call__(self, x_BTD: jax.Array, source_BSD: jax.Array) -> jax.Array:
        # queries come from the target, keys and values from the source
        q_BTHK = with_logical_constraint(self.q(x_BTD), (BATCH, SEQ, HEADS, HEAD_DIM))
        # one product for keys and values, whose gradient is then reduced over devices once
        kernel = jnp.stack([self.k.cast(), self.v.cast()], 1)
        kernel = with_logical_constraint(kernel, (EMBED, None, KV_HEADS, HEAD_DIM))
        y = jnp.tensordot(source_BSD, kernel, 1)
        y = with_logical_constraint(y, (BATCH, SEQ, None, KV_HEADS, HEAD_DIM))
        k_BSHK, v_BSHK = (
            linear.shifted(linear.adapted(y[:, :, i], source_BSD))
            for i, linear in enumerate((self.k, self.v))
        )
        # every target position sees the whole source: no causal mask
        y_BTHK = attend(q_BTHK, k_BSHK, v_BSHK, self.config.attention, causal=False)
        return to_stream(self.o, with_logical_constraint(y_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM)))


class EncoderBlock(nnx.Module):
    """Self-attention and feed-forward on the source; the target passes unchanged.

    The last one norms what it gives, once for all the decoder blocks that read it.
    """

    def __init__(self, config: BlockOptions, *, is_last: bool, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, causal=False, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.source_norm = norm_of(config) if is_last else None
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, stream: Stream, key: jax.Array | None) -> Stream:
        encoded = _recomputed(EncoderBlock.encoded, self.config.remat)
        return {**stream, "source": encoded(self, stream["source"], key)}

    def encoded(self, x_BSD: jax.Array, key: jax.Array | None) -> jax.Array:
        """The source's stream after this block."""
        # pre-norm: each half reads the normed stream and is added to the stream itself
        keys = split_key(key, 2)
        x_BSD = _added(x_BSD, self.attention(whole_seq(self.attention_norm(x_BSD))), self.dropout, keys[0])
        x_BSD = _added(x_BSD, self.mlp(whole_seq(self.mlp_norm(x_BSD))), self.dropout, keys[1])
        if self.source_norm is None:
            return x_BSD
        return with_logical_constraint(self.source_norm(x_BSD), STREAM)


class DecoderBlock(nnx.Module):
    """Causal self-attention on the target, attention to the encoded source, feed-forward.

    The source goes through untouched for the blocks after it; the last one drops it.
    """

    def __init__(self, config: BlockOptions, *, is_last: bool, rngs: nnx.Rngs):
        self.config, self.is_last = config, is_last
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, rngs=rngs)
        self.cross_norm = norm_of(config)
        self.cross = CrossAttention(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, stream: Stream, key: jax.Array | None) -> Stream:
        decoded = _recomputed(DecoderBlock.decoded, self.config.remat)
        x_BTD = decoded(self, stream["target"], stream["source"], key)
        return {"target": x_BTD} if self.is_last else {**stream, "target": x_BTD}

    def decoded(self, x_BTD: jax.Array, source_BSD: jax.Array, key: jax.Array | None) -> jax.Array:
        """The target's stream after this block."""
        # earlier target positions, then the source, then the feed-forward
        keys = split_key(key, 3)
        x_BTD = _added(x_BTD, self.attention(whole_seq(self.attention_norm(x_BTD))), self.dropout, keys[0])
        h_BTD = self.cross(whole_seq(self.cross_norm(x_BTD)), whole_seq(source_BSD))
        x_BTD = _added(x_BTD, h_BTD, self.dropout, keys[1])
        return _added(x_BTD, self.mlp(whole_seq(self.mlp_norm(x_BTD))), self.dropout, keys[2])


def _recomputed(part: Callable[..., jax.Array], remat: Remats) -> Callable[..., jax.Array]:
    """Wrap the part of a block that its backward pass recomputes, by the remat policy `remat`."""

    # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
    def call(*given: Any) -> jax.Array:
        return part(*given)

    return call if remat == "none" else jax.checkpoint(call, policy=REMAT_POLICIES[remat])


def _added(x_BTD: jax.Array, h_BTD: jax.Array, dropout: nnx.Dropout, key: jax.Array | None) -> jax.Array:
    """Add the output of a part of a block to a residual stream, after dropout."""
    h_BTD = checkpoint_name(h_BTD, BLOCK_OUTPUT)
    return with_logical_constraint(x_BTD + dropout(h_BTD, rngs=key), STREAM)


def split_key(key: jax.Array | None, num: int) -> Any:
    """Split a key of dropout; without one (dropout is off) there is none for each part."""
    return [None] * num if key is None else jax.random.split(key, num)
