"""Cache the keys and values of the tokens that a decoder has read, to compute the next token alone.

The cache is a pytree outside the model: a call takes it and returns it. The slot of a token is its position,
so the rows of a batch may have different lengths, padded on the right. An encoder-decoder also caches keys
and values of the source, which is read once. Next: `generate.py`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, HEAD_DIM, KV_HEADS, LAYERS, VOCAB
from shardtrain.models.block_stack import unstack
from shardtrain.models.residual_stream import gather_sequence
from shardtrain.models.transformer import describe_too_long

SLOTS = (LAYERS, BATCH, None, KV_HEADS, HEAD_DIM)
"""Dims of the arrays of a cache; slots are not sharded."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class NewCache:
    """A request for an empty cache, given to a model in place of a cache.

    Args:
      size: number of slots, the largest number of tokens of a row.
    """

    size: int


class KeyValueCache(NamedTuple):
    """The keys and values of the tokens that a decoder has read.

    Attributes:
      keys_LBSHK: keys of every layer, (layers, batch, slots, kv_heads, head_dim), in the compute dtype.
      values_LBSHK: values, of the same shape.
      lengths_B: int32, the number of tokens of each row; later slots are not read.
    """

    keys_LBSHK: jax.Array
    values_LBSHK: jax.Array
    lengths_B: jax.Array


class LayerCache:
    """The cache of one layer during a call; attention adds the tokens of the call to it.

    Args:
      keys_BSHK: keys of earlier tokens, by position.
      values_BSHK: values of earlier tokens, by position.
      positions_BT: the position of each token of the call, consecutive in each row.
    """

    def __init__(self, keys_BSHK: jax.Array, values_BSHK: jax.Array, positions_BT: jax.Array) -> None:
        self._keys_BSHK, self._values_BSHK, self.positions_BT = keys_BSHK, values_BSHK, positions_BT
        self.added: tuple[jax.Array, jax.Array] | None = None

    @property
    def num_slots(self) -> int:
        """The largest number of tokens of a row."""
        return self._keys_BSHK.shape[1]

    def add_tokens(self, k_BTHK: jax.Array, v_BTHK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Add keys and values of the call, also as `added`; return all of them, by position."""
        self.added = k_BTHK, v_BTHK
        starts_B = self.positions_BT[:, 0]
        return write_slots(self._keys_BSHK, k_BTHK, starts_B), write_slots(
            self._values_BSHK, v_BTHK, starts_B
        )

    def mask_BTS(self, window: int | jax.Array | None) -> jax.Array:
        """Return whether each token of the call sees each slot: up to its own position, within the window."""
        distance_BTS = self.positions_BT[:, :, None] - jnp.arange(self.num_slots)
        seen_BTS = distance_BTS >= 0
        return seen_BTS if window is None else seen_BTS & (distance_BTS < window)


def write_slots(slots_BSHK: jax.Array, new_BTHK: jax.Array, starts_B: jax.Array) -> jax.Array:
    """Write each row's new keys or values into its slots, from the row's start on."""
    return jax.vmap(lambda slots, new, start: jax.lax.dynamic_update_slice_in_dim(slots, new, start, 0))(
        slots_BSHK, new_BTHK, starts_B
    )


def new_cache(config: Any, rows: int, size: int) -> KeyValueCache:
    """Make an empty cache of `size` slots for each row of a batch.

    Raises:
      ValueError: the decoder has fewer positions.
    """
    if size > config.seq:
        raise ValueError(describe_too_long(size, config.seq))
    sizes = config.sizes
    shape = (sizes[LAYERS], rows, size, sizes[KV_HEADS], sizes[HEAD_DIM])
    empty = with_logical_constraint(jnp.zeros(shape, config.dtype), SLOTS)
    return KeyValueCache(empty, empty, jnp.zeros(rows, jnp.int32))


def read(
    decoder: Any,
    tokens_BT: jax.Array,
    cache: KeyValueCache | NewCache,
    counts_B: jax.Array | None,
    segments_BT: jax.Array | None = None,
) -> tuple[jax.Array, KeyValueCache]:
    """Let a decoder read more tokens of each row.

    Args:
      decoder: the model.
      tokens_BT: int, the next tokens of each row, padded on the right. All must fit into the slots.
      cache: the cache of earlier tokens.
      counts_B: int, the number of tokens of each row, 1 or more; None means all T.
      segments_BT: None, as a row has one document.

    Returns:
      The float32 logits of what follows each row's last token, (batch, vocab), and the cache.

    Raises:
      ValueError: see `new_cache`; or there are segments.
    """
    if segments_BT is not None:
        raise ValueError("a cache is of rows with one document; give segments without a cache")
    rows, num_tokens = tokens_BT.shape
    if isinstance(cache, NewCache):
        cache = new_cache(decoder.config, rows, cache.size)
    counts_B = jnp.full(rows, num_tokens) if counts_B is None else counts_B
    positions_BT = cache.lengths_B[:, None] + jnp.arange(num_tokens)
    # the blocks see the old cache; new keys and values are written once, for all layers
    stream = decoder.first(tokens_BT, positions_BT=positions_BT)
    x_BTD = stream["x"] if isinstance(stream, dict) else stream
    x_BTD, added = _apply_blocks(decoder, x_BTD, cache, positions_BT)
    logits_BV = with_logical_constraint(decoder.last(select_last(x_BTD, counts_B))[:, 0], (BATCH, VOCAB))
    return logits_BV, extend_cache(cache, added, counts_B)


def extend_cache(
    cache: KeyValueCache, added: tuple[jax.Array, jax.Array], counts_B: jax.Array
) -> KeyValueCache:
    """Return a cache with new keys and values of all layers, (layers, batch, T, kv_heads, head_dim)."""
    write = jax.vmap(write_slots, (0, 0, None))
    keys, values = (
        with_logical_constraint(write(slots, new, cache.lengths_B), SLOTS)
        for slots, new in zip((cache.keys_LBSHK, cache.values_LBSHK), added, strict=True)
    )
    return KeyValueCache(keys, values, cache.lengths_B + counts_B)


def select_last(x_BTD: jax.Array, counts_B: jax.Array) -> jax.Array:
    """Return the activations of each row's last token, (batch, 1, embed), which alone need logits."""
    # a sum with one term, which keeps rows on their devices
    is_last_BT = jnp.arange(x_BTD.shape[1]) == counts_B[:, None] - 1
    return jnp.where(is_last_BT[:, :, None], x_BTD, 0).sum(1, keepdims=True)


def _apply_blocks(
    decoder: Any, x_BTD: jax.Array, cache: KeyValueCache, positions_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Apply all blocks, and also return their new keys and values, (layers, batch, T, ...)."""

    def run_block(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        block, key, keys_BSHK, values_BSHK = layer
        of_layer = LayerCache(keys_BSHK, values_BSHK, positions_BT)
        x_BTD = block(x_BTD, key, cache=of_layer)
        # without the counts of routers, which are for training
        return x_BTD[0] if isinstance(x_BTD, tuple) else x_BTD, of_layer.added

    layers = (decoder.blocks, decoder.block_keys(), cache.keys_LBSHK, cache.values_LBSHK)
    if decoder.config.scan:
        return jax.lax.scan(run_block, x_BTD, layers)
    added = []
    for layer in unstack(layers):
        x_BTD, of_layer = run_block(x_BTD, layer)
        added.append(of_layer)
    return x_BTD, jax.tree.map(lambda *each: jnp.stack(each), *added)


class SourceCache(NamedTuple):
    """The keys and values of a source, and of the tokens of the target that were read.

    Attributes:
      keys_LBSHK: keys of the encoded source for every decoder block, (layers, batch, source's seq, kv_heads,
        head_dim), in the compute dtype.
      values_LBSHK: values, of the same shape.
      mask_BS: 0 for padding of the source; None if there is no padding.
      target: keys and values of the target's tokens.
    """

    keys_LBSHK: jax.Array
    values_LBSHK: jax.Array
    mask_BS: jax.Array | None
    target: KeyValueCache


def read_target(
    model: Any,
    source_BS: jax.Array | None,
    target_BT: jax.Array,
    mask_BS: jax.Array | None,
    cache: SourceCache | NewCache,
    counts_B: jax.Array | None,
) -> tuple[jax.Array, SourceCache]:
    """Let an encoder-decoder read a source, in the first call, and more tokens of its target.

    Args:
      model: the encoder-decoder.
      source_BS: int, the tokens of the source, for a new cache; else None.
      target_BT: int, the next tokens of each target, padded on the right. All must fit into the slots.
      mask_BS: 0 for padding of the source.
      cache: the cache of earlier tokens; `NewCache(size)` begins one, for targets of at most `size` tokens.
      counts_B: int, the number of tokens of each row, 1 or more; None means all T.

    Returns:
      The float32 logits of what follows each row's last token, (batch, vocab), and the cache.

    Raises:
      ValueError: source or target have more tokens than the model has positions; or there is no source for a
        new cache, or one beside a cache that has it.
    """
    if isinstance(cache, NewCache) != (source_BS is not None):
        raise ValueError(
            "a source is read once: give it with NewCache(size), and None with the cache that comes back"
        )
    rows, num_tokens = target_BT.shape
    kept = _read_source(model, source_BS, mask_BS, cache.size) if isinstance(cache, NewCache) else cache
    counts_B = jnp.full(rows, num_tokens) if counts_B is None else counts_B
    target = kept.target
    positions_BT = target.lengths_B[:, None] + jnp.arange(num_tokens)
    x_BTD = model.embed_tokens(target_BT, model.target_positions, None, positions_BT)
    table_BNH = model.broadcast_table(model.target_relative, rows)
    added = []
    for i, block in enumerate(list(model.blocks)[model.config.num_encoder_layers :]):
        of_layer = LayerCache(target.keys_LBSHK[i], target.values_LBSHK[i], positions_BT)
        source = kept.keys_LBSHK[i], kept.values_LBSHK[i]
        x_BTD = block.decode_block(x_BTD, None, kept.mask_BS, table_BNH, None, of_layer, source)
        added.append(of_layer.added)
    keys, values = map(jnp.stack, zip(*added, strict=True))
    logits_BV = model.last({"target": select_last(x_BTD, counts_B)})[:, 0]
    return (
        with_logical_constraint(logits_BV, (BATCH, VOCAB)),
        kept._replace(target=extend_cache(target, (keys, values), counts_B)),
    )


def _read_source(model: Any, source_BS: Any, mask_BS: jax.Array | None, size: int) -> SourceCache:
    """Encode the source, and compute its keys and values for every decoder block."""
    config, rows = model.config, source_BS.shape[0]
    blocks = list(model.blocks)
    x_BSD = model.embed_tokens(source_BS, model.source_positions, None)
    table_BNH = model.broadcast_table(model.source_relative, rows)
    for block in blocks[: config.num_encoder_layers]:
        x_BSD = block.encode_block(x_BSD, mask_BS, table_BNH, None)
    x_BSD = gather_sequence(x_BSD)
    of_blocks = [block.cross.project_source(x_BSD) for block in blocks[config.num_encoder_layers :]]
    keys, values = (with_logical_constraint(jnp.stack(each), SLOTS) for each in zip(*of_blocks, strict=True))
    of_decoder = replace(config.parts, num_layers=config.num_decoder_layers)
    return SourceCache(keys, values, mask_BS, new_cache(of_decoder, rows, size))
