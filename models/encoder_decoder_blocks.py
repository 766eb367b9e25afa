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

from shardtrain.axes import BATCH, EMBED, HEAD_DIM, HEADS, KV_HEADS, SEQ
from shardtrain.functional.remat_policies import REMAT_POLICIES, as_block_input
from shardtrain.models.attention import attend
from shardtrain.models.key_value_cache import LayerCache
from shardtrain.models.relative_positions import cached_relative_bias, relative_bias
from shardtrain.models.residual_stream import (
    STREAM,
    add_part,
    read_by_products,
    split_key,
    to_stream,
    whole_seq,
)
from shardtrain.models.transformer import Attention, FeedForward, norm_of
from shardtrain.models.transformer_options import BlockOptions, Remats

Stream = dict[str, jax.Array]
"""The residual streams (batch, seq, embed) of "source" and of "target"; "source_mask" (batch, seq) if one was
given; "source_bias" and "target_bias" (batch, buckets, heads) of relative positions. The last encoder
block drops its bias, the last decoder block all but the target."""


class CrossAttention(Attention):
    """Attention of the normed target stream to the encoded source, back to the target's residual stream."""

    def __call__(
        self,
        x_BTD: jax.Array,
        source_BSD: jax.Array | None,
        mask_BS: jax.Array | None = None,
        kept: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Attend to the source.

        Args:
          x_BTD: the normed stream of the target.
          source_BSD: the encoded source; not read where there is `kept`.
          mask_BS: 0 for padding of the source.
          kept: keys and values of the source, of `of_source`, that were computed before.
        """
        # queries come from the target, keys and values from the source
        q_BTHK = self.scaled(self.q(x_BTD))
        k_BSHK, v_BSHK = self.of_source(source_BSD) if kept is None else kept
        # every target position sees the whole source but for padding: no causal mask
        y_BTHK = attend(q_BTHK, k_BSHK, v_BSHK, self.config.attention, causal=False, mask_BS=mask_BS)
        return to_stream(self.o, with_logical_constraint(y_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM)))

    def of_source(self, source_BSD: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the keys and values of the encoded source, (batch, source's seq, kv_heads, head_dim)."""
        # one product for keys and values, whose gradient is then reduced over devices once
        kernel = jnp.stack([self.k.cast(), self.v.cast()], 1)
        kernel = with_logical_constraint(kernel, (EMBED, None, KV_HEADS, HEAD_DIM))
        y = jnp.tensordot(source_BSD, kernel, 1)
        y = with_logical_constraint(y, (BATCH, SEQ, None, KV_HEADS, HEAD_DIM))
        k_BSHK, v_BSHK = (
            linear.shifted(linear.adapted(y[:, :, i], source_BSD))
            for i, linear in enumerate((self.k, self.v))
        )
        return k_BSHK, v_BSHK


class EncoderBlock(nnx.Module):
    """Self-attention and feed-forward on the source; the target passes unchanged.

    The last one norms what it gives, once for all the decoder blocks that read it.
    """

    def __init__(
        self, config: BlockOptions, *, is_last: bool, max_distance: int | None = None, rngs: nnx.Rngs
    ):
        self.config, self.max_distance = config, max_distance
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, causal=False, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.source_norm = norm_of(config) if is_last else None
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, stream: Stream, key: jax.Array | None) -> Stream:
        encoded = _recomputed(EncoderBlock.encoded, self.config.remat)
        seen = stream.get("source_mask"), stream.get("source_bias")
        after = {**stream, "source": encoded(self, stream["source"], *seen, key)}
        if self.source_norm is not None:
            after.pop("source_bias", None)
        return after

    def encoded(
        self,
        x_BSD: jax.Array,
        mask_BS: jax.Array | None,
        table_BNH: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        """The source's stream after this block."""
        # pre-norm: each half reads the normed stream and is added to the stream itself
        keys = split_key(key, 2)
        bias_BHSS = _bias(table_BNH, x_BSD.shape[1], self.max_distance, causal=False)
        h_BSD = self.attention(read_by_products(self.attention_norm(x_BSD)), mask_BS, bias_BHTS=bias_BHSS)
        x_BSD = add_part(x_BSD, h_BSD, self.dropout, keys[0])
        x_BSD = add_part(x_BSD, self.mlp(read_by_products(self.mlp_norm(x_BSD))), self.dropout, keys[1])
        if self.source_norm is None:
            return x_BSD
        return with_logical_constraint(self.source_norm(x_BSD), STREAM)


class DecoderBlock(nnx.Module):
    """Causal self-attention on the target, attention to the encoded source, feed-forward.

    The source goes through untouched for the blocks after it; the last one drops it.
    """

    def __init__(
        self, config: BlockOptions, *, is_last: bool, max_distance: int | None = None, rngs: nnx.Rngs
    ):
        self.config, self.is_last, self.max_distance = config, is_last, max_distance
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, rngs=rngs)
        self.cross_norm = norm_of(config)
        self.cross = CrossAttention(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, stream: Stream, key: jax.Array | None) -> Stream:
        decoded = _recomputed(DecoderBlock.decoded, self.config.remat)
        seen = stream.get("source_mask"), stream.get("target_bias")
        x_BTD = decoded(self, stream["target"], stream["source"], *seen, key)
        return {"target": x_BTD} if self.is_last else {**stream, "target": x_BTD}

    def decoded(
        self,
        x_BTD: jax.Array,
        source_BSD: jax.Array | None,
        mask_BS: jax.Array | None,
        table_BNH: jax.Array | None,
        key: jax.Array | None,
        cache: LayerCache | None = None,
        kept: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """The target's stream after this block.

        Args:
          x_BTD: before it.
          source_BSD: the encoded source; None: keys and values of it are `kept`.
          mask_BS: 0 for padding of the source.
          table_BNH: numbers of relative positions.
          key: of dropout.
          cache: keys and values of the target's tokens before these.
          kept: see `CrossAttention`.
        """
        # earlier target positions, then the source, then the feed-forward
        keys = split_key(key, 3)
        bias_BHTS = _bias(table_BNH, x_BTD.shape[1], self.max_distance, causal=True, cache=cache)
        h_BTD = self.attention(read_by_products(self.attention_norm(x_BTD)), cache=cache, bias_BHTS=bias_BHTS)
        x_BTD = add_part(x_BTD, h_BTD, self.dropout, keys[0])
        source_BSD = None if source_BSD is None else whole_seq(source_BSD)
        h_BTD = self.cross(whole_seq(self.cross_norm(x_BTD)), source_BSD, mask_BS, kept)
        x_BTD = add_part(x_BTD, h_BTD, self.dropout, keys[1])
        return add_part(x_BTD, self.mlp(read_by_products(self.mlp_norm(x_BTD))), self.dropout, keys[2])


def _bias(
    table_BNH: jax.Array | None,
    num: int,
    max_distance: int | None,
    *,
    causal: bool,
    cache: LayerCache | None = None,
) -> jax.Array | None:
    if table_BNH is None or max_distance is None:
        return None
    if cache is not None:
        return cached_relative_bias(table_BNH, cache.positions_BT, cache.num_slots, max_distance=max_distance)
    return relative_bias(table_BNH, num, num, max_distance=max_distance, causal=causal)


def _recomputed(part: Callable[..., jax.Array], remat: Remats) -> Callable[..., jax.Array]:
    """Wrap the part of a block that its backward pass recomputes, by the remat policy `remat`."""

    # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
    def call(block: Any, x_BTD: jax.Array, *given: Any) -> jax.Array:
        return part(block, as_block_input(x_BTD, remat), *given)

    return call if remat == "none" else jax.checkpoint(call, policy=REMAT_POLICIES[remat])
