"""An encoder-decoder transformer in nnx: `EncoderDecoderConfig` builds the model `EncoderDecoder`.

Its blocks are one `nnx.List`: encoder blocks first, then decoder blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, HEAD_DIM, HEADS, KV_HEADS, SEQ, VOCAB
from shardtrain.functional.remat_counts import Remats
from shardtrain.functional.remat_policies import REMAT_POLICIES, name_block_input
from shardtrain.models.attention import attend
from shardtrain.models.decoder_block import Block
from shardtrain.models.key_value_cache import LayerCache, NewCache, SourceCache, read_target
from shardtrain.models.layers import cast_and_constrain, normal
from shardtrain.models.ops import WithOps
from shardtrain.models.relative_positions import compute_bias, compute_cached_bias, make_table
from shardtrain.models.residual_stream import (
    STREAM,
    add_part,
    gather_sequence,
    project_to_stream,
    read_by_products,
    split_key,
)
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
from shardtrain.models.transformer_options import BlockOptions, DecodingOptions


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(DecodingOptions):
    """Sizes and options of an encoder-decoder; called with `nnx.Rngs` it builds the model.

    Source and target have one vocabulary and one table of tokens.

    Args:
      num_encoder_layers: number of blocks that encode the source.
      num_decoder_layers: number of blocks that attend to earlier positions of the target and to the encoded
        source.
      positions: "learned" adds a table of embeddings, "rotary" rotates queries and keys, "relative" (as T5)
        adds a number for each head and bucket of distances to the scores of self-attention.
      relative_buckets: number of buckets of relative positions; an encoder has half of them for each side.
        None means 32.
      relative_distance: all distances from this one on share a bucket. None means 128.
      head_scale: factor of the head's input. None means 1.

    References:
      Vaswani et al. 2017, Attention is all you need, https://arxiv.org/abs/1706.03762, section 3, with the
      norms before each part of a block and after the last (Xiong et al. 2020,
      https://arxiv.org/abs/2002.04745); relative positions of Raffel et al. 2019, T5, arXiv 1910.10683.

    >>> sizes = {"vocab": 256, "seq": 32, "embed": 64, "num_heads": 4}
    >>> EncoderDecoderConfig(**sizes, num_encoder_layers=2, num_decoder_layers=3).num_blocks
    5
    """

    num_encoder_layers: int
    num_decoder_layers: int
    positions: Literal["learned", "rotary", "relative"] = "learned"
    relative_buckets: int | None = None
    relative_distance: int | None = None
    head_scale: float | None = None
    remat: Remats = "weights"

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        return super().list_problems() + _find_problems(self)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of encoder and decoder."""
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def distances(self) -> tuple[int, int]:
        """(relative_buckets, relative_distance), with the defaults filled in."""
        buckets, furthest = self.relative_buckets, self.relative_distance
        return 32 if buckets is None else buckets, 128 if furthest is None else furthest

    @property
    def parts(self) -> BlockOptions:
        """Options of the parts of a block, without relative positions."""
        positions = "rotary" if self.positions == "rotary" else "learned"
        return self.block_options(num_layers=self.num_blocks, positions=positions)

    def __call__(self, rngs: nnx.Rngs) -> "EncoderDecoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return EncoderDecoder(self, rngs=rngs)


def _find_problems(config: EncoderDecoderConfig) -> list[str]:
    """List the problems of the options that only an encoder-decoder has."""
    buckets, furthest = config.distances
    if config.positions != "relative" or buckets < 1 or furthest < 1:
        return []
    found: list[str] = []
    if buckets % 4:
        use = max(4, buckets - buckets % 4)
        found.append(f"relative_buckets is {buckets}; it is a multiple of 4. Use relative_buckets={use}.")
    if furthest <= buckets // 2:
        found.append(
            f"relative_distance is {furthest}; it is above half of relative_buckets,"
            f" {buckets}. Use relative_distance={buckets // 2 + 1} or more."
        )
    if config.attention in ("cudnn", "blockwise"):
        found.append(
            f"attention {config.attention!r} has no relative positions; use attention='auto' or 'xla'"
        )
    return found


Stream = dict[str, jax.Array]
"""Activations between blocks: the residual streams (batch, seq, embed) of "source" and "target";
"source_mask" (batch, seq) if one was given; "source_bias" and "target_bias" (batch, buckets, heads) of
relative positions. The last encoder block drops its bias, the last decoder block everything except the
target."""


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
          source_BSD: the encoded source; not read if `kept` is given.
          mask_BS: 0 for padding of the source.
          kept: keys and values of the source that `project_source` has computed before.
        """
        # queries come from the target, keys and values from the source
        q_BTHK = self.scaled(self.q(x_BTD))
        k_BSHK, v_BSHK = self.project_source(source_BSD) if kept is None else kept
        # every target position sees the whole source except padding: no causal mask
        seen: dict[str, Any] = {"causal": False, "mask_BS": mask_BS}
        y_BTHK = attend(self.ops, q_BTHK, k_BSHK, v_BSHK, self.config.attention, **seen)
        y_BTHK = with_logical_constraint(y_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM))
        return project_to_stream(self.ops, self.o, y_BTHK)

    def project_source(self, source_BSD: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the keys and values of the encoded source, (batch, source's seq, kv_heads, head_dim)."""
        # one product for keys and values, whose gradient is then reduced over devices once
        kernel = jnp.stack([self.k.cast(), self.v.cast()], 1)
        kernel = with_logical_constraint(kernel, (EMBED, None, KV_HEADS, HEAD_DIM))
        y = jnp.tensordot(source_BSD, kernel, 1)
        y = with_logical_constraint(y, (BATCH, SEQ, None, KV_HEADS, HEAD_DIM))
        k_BSHK, v_BSHK = (
            linear.add_bias(linear.add_adapter(y[:, :, i], source_BSD))
            for i, linear in enumerate((self.k, self.v))
        )
        return k_BSHK, v_BSHK


class EncoderBlock(Block):
    """Self-attention and feed-forward on the source; the target passes unchanged.

    The last encoder block norms its output, once for all decoder blocks.
    """

    def __init__(
        self, config: BlockOptions, *, is_last: bool, max_distance: int | None = None, rngs: nnx.Rngs
    ):
        super().__init__(config, rngs=rngs, causal=False)
        self.config, self.max_distance = config, max_distance
        self.source_norm = make_norm(config) if is_last else None

    def __call__(self, stream: Stream, key: jax.Array | None) -> Stream:
        encode = _wrap_remat(EncoderBlock.encode_block, self.config.remat)
        seen = stream.get("source_mask"), stream.get("source_bias")
        after = {**stream, "source": encode(self, stream["source"], *seen, key)}
        if self.source_norm is not None:
            after.pop("source_bias", None)
        return after

    def encode_block(
        self,
        x_BSD: jax.Array,
        mask_BS: jax.Array | None,
        table_BNH: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        """Return the source's stream after this block."""
        bias_BHSS = _compute_bias(table_BNH, x_BSD.shape[1], self.max_distance, causal=False)
        x_BSD = super().__call__(x_BSD, key, mask_BS=mask_BS, bias_BHTS=bias_BHSS)
        if self.source_norm is None:
            return x_BSD
        return with_logical_constraint(self.source_norm(x_BSD), STREAM)


class DecoderBlock(WithOps):
    """Causal self-attention on the target, attention to the encoded source, feed-forward.

    The source passes unchanged to later blocks; the last block drops it.
    """

    def __init__(
        self, config: BlockOptions, *, is_last: bool, max_distance: int | None = None, rngs: nnx.Rngs
    ):
        self.config, self.is_last, self.max_distance = config, is_last, max_distance
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.cross_norm = make_norm(config)
        self.cross = CrossAttention(config, rngs=rngs)
        self.mlp_norm = make_norm(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, stream: Stream, key: jax.Array | None) -> Stream:
        decode = _wrap_remat(DecoderBlock.decode_block, self.config.remat)
        seen = stream.get("source_mask"), stream.get("target_bias")
        x_BTD = decode(self, stream["target"], stream["source"], *seen, key)
        return {"target": x_BTD} if self.is_last else {**stream, "target": x_BTD}

    def decode_block(
        self,
        x_BTD: jax.Array,
        source_BSD: jax.Array | None,
        mask_BS: jax.Array | None,
        table_BNH: jax.Array | None,
        key: jax.Array | None,
        cache: LayerCache | None = None,
        kept: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Return the target's stream after this block.

        Args:
          x_BTD: the target's stream before the block.
          source_BSD: the encoded source; None if `kept` has its keys and values.
          mask_BS: 0 for padding of the source.
          table_BNH: the table of relative positions.
          key: key of dropout.
          cache: keys and values of earlier tokens of the target.
          kept: see `CrossAttention`.
        """
        # earlier target positions, then the source, then the feed-forward
        keys = split_key(key, 3)
        bias_BHTS = _compute_bias(table_BNH, x_BTD.shape[1], self.max_distance, causal=True, cache=cache)
        h_BTD = read_by_products(self.ops, self.attention_norm(x_BTD))
        h_BTD = self.attention(h_BTD, cache=cache, bias_BHTS=bias_BHTS)
        x_BTD = add_part(self.ops, x_BTD, h_BTD, self.dropout, keys[0])
        source_BSD = None if source_BSD is None else gather_sequence(source_BSD)
        h_BTD = self.cross(gather_sequence(self.cross_norm(x_BTD)), source_BSD, mask_BS, kept)
        x_BTD = add_part(self.ops, x_BTD, h_BTD, self.dropout, keys[1])
        h_BTD = self.mlp(read_by_products(self.ops, self.mlp_norm(x_BTD)))
        return add_part(self.ops, x_BTD, h_BTD, self.dropout, keys[2])


def _compute_bias(
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
        return compute_cached_bias(table_BNH, cache.positions_BT, cache.num_slots, max_distance=max_distance)
    return compute_bias(table_BNH, num, num, max_distance=max_distance, causal=causal)


def _wrap_remat(part: Callable[..., jax.Array], remat: Any) -> Callable[..., jax.Array]:
    """Let the backward pass of a part recompute what the remat policy does not keep."""

    # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
    def call(block: Any, x_BTD: jax.Array, *given: Any) -> jax.Array:
        return part(block, name_block_input(x_BTD, remat), *given)

    return call if remat == "none" else jax.checkpoint(call, policy=REMAT_POLICIES[remat])


class EncoderDecoder(DropoutKeys):
    """Map tokens of a source and a target to logits; `nnx.view(model, deterministic=True)` drops nothing."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        parts = config.parts
        table = partial(normal, sizes=config.sizes, std=0.02, rngs=rngs)
        self.embedding = table(TABLE)
        # one table of tokens for both sequences, a table of positions for each
        learned = config.positions == "learned"
        self.source_positions = table((SEQ, EMBED)) if learned else None
        self.target_positions = table((SEQ, EMBED)) if learned else None
        # a table of distances for all blocks of a kind
        shape, relative = (config.distances[0], config.sizes[HEADS]), config.positions == "relative"
        self.source_relative = make_table(*shape, rngs) if relative else None
        self.target_relative = make_table(*shape, rngs) if relative else None
        # the last block of each kind differs: the encoder's norms the source, the decoder's drops it
        self.blocks = nnx.List(
            [
                Kind(parts, is_last=i == num - 1, max_distance=config.distances[1], rngs=rngs)
                for Kind, num in (
                    (EncoderBlock, config.num_encoder_layers),
                    (DecoderBlock, config.num_decoder_layers),
                )
                for i in range(num)
            ]
        )
        self.final_norm = make_norm(parts)
        self.head = None if config.tied else make_linear(parts, (EMBED,), (VOCAB,), rngs, bias=False)
        self.start_dropout(config.dropout, 1 + config.num_blocks, rngs)

    def __call__(
        self,
        source_BS: Any,
        target_BT: jax.Array,
        source_mask_BS: jax.Array | None = None,
        cache: SourceCache | NewCache | None = None,
        counts_B: jax.Array | None = None,
    ) -> Any:
        """Predict the next token at every position of the target.

        Args:
          source_BS: int token ids below `vocab`; S is at most `seq`. An id out of range gives NaN. None if
            the cache has the source.
          target_BT: int token ids below `vocab`; T is at most `seq`.
          source_mask_BS: 0 for padding of the source, which no position sees; by default there is none.
          cache: the cache of the source and of earlier tokens of the target, see
            `key_value_cache.read_target`; `NewCache` begins one.
          counts_B: with a cache, the number of the target's tokens of each row.

        Returns:
          Logits (batch, target's seq, vocab), float32. With a cache: logits of each target's last token,
          (batch, vocab), and the cache.

        Raises:
          ValueError: if S or T is above `seq`, or a source is missing, or given again.
        """
        if cache is not None:
            return read_target(self, source_BS, target_BT, source_mask_BS, cache, counts_B)
        stream = self.first(source_BS, target_BT, source_mask_BS)
        logits_BTV = self.last(self.run(self.blocks, stream, self.block_keys()))
        self.advance_dropout()
        return logits_BTV

    def first(
        self, source_BS: jax.Array, target_BT: jax.Array, source_mask_BS: jax.Array | None = None
    ) -> Stream:
        """Look up tokens and positions of both sequences; return the streams that enter the blocks."""
        # one key for both embeddings, split between them
        source_key, target_key = split_key(self.embedding_key(), 2)
        stream = {
            "source": self.embed_tokens(source_BS, self.source_positions, source_key),
            "target": self.embed_tokens(target_BT, self.target_positions, target_key),
        }
        if source_mask_BS is not None:
            stream["source_mask"] = source_mask_BS
        for name, table in (("source_bias", self.source_relative), ("target_bias", self.target_relative)):
            if (table_BNH := self.broadcast_table(table, source_BS.shape[0])) is not None:
                stream[name] = table_BNH
        return stream

    def broadcast_table(self, table: nnx.Param | None, rows: int) -> jax.Array | None:
        """Return a copy of a table of relative positions for each example, so that pipelines pass it on."""
        if table is None:
            return None
        table_NH = cast_and_constrain(table, (None, HEADS), "float32")
        table_BNH = jnp.broadcast_to(table_NH, (rows, *table_NH.shape))
        return with_logical_constraint(table_BNH, (BATCH, None, HEADS))

    def run(self, blocks: Sequence[Any], stream: Stream, keys: jax.Array | None) -> Stream:
        """Apply blocks to the activations, in order: all, or those of a pipeline stage."""
        for i, block in enumerate(blocks):
            stream = block(stream, None if keys is None else keys[i])
        return stream

    def last(self, stream: Stream) -> jax.Array:
        """Return the float32 logits, rounded to dtype, from the target's stream."""
        x_BTD = gather_sequence(self.final_norm(stream["target"]))
        if self.config.head_scale is not None:
            x_BTD *= jnp.asarray(self.config.head_scale, x_BTD.dtype)
        return compute_logits(self.config.parts, x_BTD, self.head, self.embedding)

    def embed_tokens(
        self, tokens_BT: jax.Array, table: nnx.Param | None, key: jax.Array | None, positions_BT: Any = None
    ) -> jax.Array:
        """Look up tokens, and add positions from a table; by default positions count from 0."""
        x_BTD = embed_tokens(self.config, self.embedding, tokens_BT)
        x_BTD = add_positions(self.ops, self.config, x_BTD, table, None, positions_BT)
        return self.drop_embedding(x_BTD, key)
