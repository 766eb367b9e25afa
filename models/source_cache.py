"""What an encoder-decoder keeps between the tokens of a target: the source, read once, and the target's keys.

The cache is a pytree outside the model, as that of a decoder (`key_value_cache.py`), and sharded alike.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, VOCAB
from shardtrain.models.key_value_cache import (
    SLOTS,
    KeyValueCache,
    LayerCache,
    NewCache,
    extended,
    last_of,
    new_cache,
)
from shardtrain.models.residual_stream import whole_seq


class SourceCache(NamedTuple):
    """What the decoder blocks need of a source, and of the tokens of the target that they have read.

    Attributes:
      keys_LBSHK: of the encoded source, for every decoder block: (layers, batch, source's seq, kv_heads,
        head_dim), in the compute dtype.
      values_LBSHK: likewise.
      mask_BS: 0 for padding of the source; None: there is none.
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
    """Let an encoder-decoder read a source, with the first call, and more tokens of its target.

    Args:
      model: the encoder-decoder.
      source_BS: int, the tokens of the source, for a new cache; else None.
      target_BT: int, the next tokens of each target; padding follows them. All must fit the slots.
      mask_BS: 0 for padding of the source.
      cache: of the tokens before; `NewCache(size)` for the first ones of targets of at most `size` tokens.
      counts_B: int, how many of the T tokens each row has, 1 or more; None: all.

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
    x_BTD = model.embedded(target_BT, model.target_positions, None, positions_BT)
    table_BNH = model.distances_of(model.target_relative, rows)
    added = []
    for i, block in enumerate(list(model.blocks)[model.config.num_encoder_layers :]):
        of_layer = LayerCache(target.keys_LBSHK[i], target.values_LBSHK[i], positions_BT)
        source = kept.keys_LBSHK[i], kept.values_LBSHK[i]
        x_BTD = block.decoded(x_BTD, None, kept.mask_BS, table_BNH, None, of_layer, source)
        added.append(of_layer.added)
    keys, values = map(jnp.stack, zip(*added, strict=True))
    logits_BV = model.last({"target": last_of(x_BTD, counts_B)})[:, 0]
    return (
        with_logical_constraint(logits_BV, (BATCH, VOCAB)),
        kept._replace(target=extended(target, (keys, values), counts_B)),
    )


def _read_source(model: Any, source_BS: Any, mask_BS: jax.Array | None, size: int) -> SourceCache:
    """Encode the source, and compute its keys and values for every decoder block."""
    config, rows = model.config, source_BS.shape[0]
    blocks = list(model.blocks)
    x_BSD = model.embedded(source_BS, model.source_positions, None)
    table_BNH = model.distances_of(model.source_relative, rows)
    for block in blocks[: config.num_encoder_layers]:
        x_BSD = block.encoded(x_BSD, mask_BS, table_BNH, None)
    x_BSD = whole_seq(x_BSD)
    of_blocks = [block.cross.of_source(x_BSD) for block in blocks[config.num_encoder_layers :]]
    keys, values = (with_logical_constraint(jnp.stack(each), SLOTS) for each in zip(*of_blocks, strict=True))
    of_decoder = replace(config.parts, num_layers=config.num_decoder_layers)
    return SourceCache(keys, values, mask_BS, new_cache(of_decoder, rows, size))
