"""A causal decoder of the GPT and Llama families in nnx: `DecoderConfig` builds the model `Decoder`.

Blocks are stacked along the dim layers, scanned or unrolled, with the same parameters. The model names dims
and knows no mesh. `transformer.py` has its parts; `huggingface/` loads pretrained models.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.axes import EMBED, SEQ, VOCAB
from shardtrain.models.block_stack import stack_blocks, walk
from shardtrain.models.decoder_block import Block, BlockInputs, Stream
from shardtrain.models.experts_routing import REPLICAS, add_block, make_counts, move_bias, read_routing
from shardtrain.models.key_value_cache import KeyValueCache, NewCache, read
from shardtrain.models.layers import normal
from shardtrain.models.residual_stream import gather_sequence
from shardtrain.models.transformer import (
    TABLE,
    DropoutKeys,
    add_positions,
    compute_logits,
    embed_tokens,
    make_linear,
    make_norm,
)
from shardtrain.models.transformer_options import BlockOptions


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(BlockOptions):
    """Sizes and options of a decoder; called with `nnx.Rngs` it builds the model.

    `transformer_options.py` describes the options.

    >>> config = DecoderConfig(vocab=256, seq=32, embed=64, num_layers=2, num_heads=4)
    >>> config.sizes["head_dim"], config.sizes["mlp"]
    (16, 256)
    """

    def __call__(self, rngs: nnx.Rngs) -> "Decoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Decoder(self, rngs=rngs)


class Decoder(DropoutKeys):
    """Map token ids to logits; `nnx.view(decoder, deterministic=True)` is the same model without dropout.

    A call composes `first`, `run` on `blocks` with `block_keys`, and `last`. A pipeline calls them in
    separate programs, and `run` on parts of the blocks.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        # embeddings of tokens and, unless positions are rotary, of positions
        table = partial(normal, sizes=config.sizes, std=0.02, rngs=rngs)
        self.embedding = table(TABLE)
        self.positions = table((SEQ, EMBED)) if config.positions == "learned" else None
        # the blocks, and the head, which may be the embedding again
        self.blocks = stack_blocks(Block, config, rngs)
        self.final_norm = make_norm(config)
        self.head = None if config.tied else make_linear(config, (EMBED,), (VOCAB,), rngs, bias=False)
        experts = config.experts
        # its losses and its bias need sums over replicas, which the functions of the model are given by this
        self.axis_name = REPLICAS if experts and experts.over_replicas else None
        self.start_dropout(config.dropout, 1 + config.num_layers, rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        cache: KeyValueCache | NewCache | None = None,
        counts_B: jax.Array | None = None,
        *,
        auxiliary: bool = False,
    ) -> Any:
        """Predict the next token at every position.

        Args:
          tokens_BT: int token ids below `vocab`; T is at most `seq`. An id out of range gives NaN.
          segments_BT: int, the number of each token's document, if rows have several: a position sees only
            its own document, and positions restart in each; by default a row is one document.
          cache: the cache of earlier tokens, see `key_value_cache.read`; `NewCache` begins one.
          counts_B: with a cache, the number of tokens of each row.
          auxiliary: whether to return the `Routing` of a mixture of experts in addition to the logits.

        Returns:
          Logits (batch, seq, vocab), float32; with `loss_chunk` as `ChunkedLogits`. With a cache: logits of
          each row's last token, (batch, vocab), and the cache. With `auxiliary` the pair of the logits and a
          `Routing`, None without experts.

        Raises:
          ValueError: if T is above `seq`, or there is a cache beside segments.
        """
        if cache is not None:
            found = read(self, tokens_BT, cache, counts_B, segments_BT)
            return (found, None) if auxiliary else found
        stream = self.run(self.blocks, self.first(tokens_BT, segments_BT), self.block_keys())
        outputs = self.last(stream, auxiliary=auxiliary)
        if not self.dropout.deterministic:
            move_bias(self.config.experts, self.blocks.mlp, stream)
        self.advance_dropout()
        return outputs

    def first(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None, positions_BT: Any = None
    ) -> Stream:
        """Look up tokens and positions (see `add_positions`), as input of the first block."""
        x_BTD = embed_tokens(self.config, self.embedding, tokens_BT)
        if self.config.embed_scale is not None:
            x_BTD *= jnp.asarray(self.config.embed_scale, x_BTD.dtype)
        x_BTD = add_positions(self.ops, self.config, x_BTD, self.positions, segments_BT, positions_BT)
        x_BTD = self.drop_embedding(x_BTD, self.embedding_key())
        stream: dict[str, Any] = {} if segments_BT is None else {"segments": segments_BT}
        if experts := self.config.experts:
            stream["routers"] = make_counts(experts, len(x_BTD), self.config.num_layers)
        return {"x": x_BTD, **stream} if stream else x_BTD

    def block_keys(self) -> jax.Array | BlockInputs | None:
        """Return the dropout keys of the blocks, (num_layers,) or None; `BlockInputs` if blocks differ."""
        keys = super().block_keys()
        if (every := self.config.full_every) is None:
            return keys
        return BlockInputs(keys, jnp.arange(1, 1 + self.config.num_layers) % every == 0)

    def run(self, blocks: Block, stream: Stream, keys: jax.Array | BlockInputs | None) -> Stream:
        """Apply stacked blocks to the residual stream: all blocks, or those of a pipeline stage."""
        assert self.config.full_every is None or isinstance(keys, BlockInputs), "pass block_keys() as keys"
        parts = stream if isinstance(stream, dict) else {"x": stream}

        # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
        def run_block(block: Block, carry: Any, key: jax.Array | BlockInputs | None) -> Any:
            x_BTD = block(carry["x"], key, parts.get("segments"))
            if "routers" not in carry:
                return {"x": x_BTD}
            x_BTD, of_block = x_BTD
            return {"x": x_BTD, "routers": add_block(carry["routers"], of_block)}

        carried = {name: parts[name] for name in ("x", "routers") if name in parts}
        carried = walk(self.ops, self.config, run_block, blocks, carried, keys)
        return {**stream, **carried} if isinstance(stream, dict) else carried["x"]

    def last(self, stream: Stream, *, auxiliary: bool = False) -> Any:
        """Return the float32 logits, rounded to dtype; with `auxiliary` also the `Routing`."""
        x_BTD = stream["x"] if isinstance(stream, dict) else stream
        logits_BTV = compute_logits(
            self.config, gather_sequence(self.final_norm(x_BTD)), self.head, self.embedding
        )
        return (logits_BTV, read_routing(self.config.experts, stream)) if auxiliary else logits_BTV


def gpt2(**changes: Any) -> DecoderConfig:
    """GPT-2 small, 124 million parameters; pass vocab=50304 to split the vocabulary over devices."""
    config = DecoderConfig(vocab=50257, seq=1024, embed=768, num_layers=12, num_heads=12)
    return replace(config, **changes)
