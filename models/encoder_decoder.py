"""An encoder-decoder transformer in nnx: `EncoderDecoderConfig` is the factory, `EncoderDecoder` the model.

Encoder blocks come first, then decoder blocks, in one `nnx.List`; `encoder_decoder_blocks.py` has both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, HEADS, SEQ, VOCAB
from shardtrain.models import checks
from shardtrain.models.attention import Attentions
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder_decoder_blocks import (
    CrossAttention,
    DecoderBlock,
    EncoderBlock,
    Stream,
    split_key,
)
from shardtrain.models.float8 import Products
from shardtrain.models.key_value_cache import NewCache
from shardtrain.models.layers import Norms, at_use, coming_keys, looked_up, normal, positions_of
from shardtrain.models.on_gpus import rows_last
from shardtrain.models.relative_positions import relative_table
from shardtrain.models.residual_stream import STREAM, whole_seq
from shardtrain.models.source_cache import SourceCache, read_target
from shardtrain.models.transformer import TABLE, linear_of, logits_of, norm_of, too_long
from shardtrain.models.transformer_options import (
    RARE,
    Activations,
    Dtypes,
    Remats,
    block_sizes,
    encoder_decoder_problems,
    problems,
)

__all__ = ("CrossAttention", "DecoderBlock", "EncoderBlock", "EncoderDecoder", "EncoderDecoderConfig")

OWN = (
    "num_encoder_layers", "num_decoder_layers", "positions", "relative_buckets", "relative_distance",
    "head_scale",
)  # fmt: skip
"""Options that no part of a block reads."""


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Sizes and options of an encoder-decoder; called with `nnx.Rngs` it builds the model.

    Args:
      vocab: number of tokens in the vocabulary, one for both sequences.
      seq: largest number of positions of each sequence.
      embed: features of each position between blocks.
      num_encoder_layers: blocks that encode the source.
      num_decoder_layers: blocks that attend to earlier positions of the target and to the encoded source.
      num_heads: query heads.
      num_kv_heads: key and value heads (grouped-query attention); None: as many as `num_heads`.
      head_dim: features of each head; None: embed // num_heads.
      mlp: hidden features of the feed-forward; None: 4 * embed.
      positions: "learned", a table of embeddings; "rotary", rotated queries and keys; or "relative" (as T5),
        a number for each head and bucket of distances that is added to the scores of self-attention.
      theta: base of the rotary wavelengths.
      norm: kind of norm before each part of a block and before the head.
      eps: added to the variance in the norms.
      activation: "gelu" (tanh approximation), "gelu_erf" (exact) or "relu"; or with a second, gating
        projection "swiglu" or "geglu".
      bias: whether projections and layer norms have biases (the head has none).
      tied: whether the head is the embedding table. Source and target always share that table.
      dropout: rate on the embedding and on the outputs of attention and feed-forward, from the rng stream
        "dropout".
      remat: what the backward pass recomputes. "none": nothing. "weights": only casts and copies, so that no
        gathered weight is kept for it. "dots": all but matrix products. "outputs": all but the outputs of
        attention and feed-forward, which tensor parallelism reduces over devices. "full": all but the input
        of a block. "offload": likewise, and that input waits in the memory of the host.
      dtype: compute dtype; parameters, norms, softmax and logits are float32.
      attention: "xla"; "cudnn", flash attention on NVIDIA GPUs; or "auto": "cudnn" where device, dtype and
        head_dim allow it, else "xla".
      loss_chunk: number of tokens of a device whose logits exist at the same time, in the loss and its
        gradient. None: all of them.
      lora: low-rank adapters of the blocks' projections, as "rank=8" or "rank=8,alpha=16,on=q+v"; then they
        alone are trained. Empty: none.
      products: "float8": the blocks' matrix products with operands rounded to 8 bits, for NVIDIA GPUs from
        Ada on; the gradients of kernels, attention and the head stay in `dtype`. Empty: all in `dtype`.
      relative_buckets: buckets of relative positions; an encoder has half of them for each side. None: 32.
      relative_distance: from how many positions on all distances are in one bucket. None: 128.
      query_scale: what scores of attention are multiplied by; None: the inverse root of head_dim.
      head_scale: what the head's input is multiplied by; None: 1.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.

    References:
      Vaswani et al. 2017, Attention is all you need, https://arxiv.org/abs/1706.03762, section 3, with the
      norms before each part of a block and after the last (Xiong et al. 2020,
      https://arxiv.org/abs/2002.04745); relative positions of Raffel et al. 2019, T5, arXiv 1910.10683.

    >>> sizes = {"vocab": 256, "seq": 32, "embed": 64, "num_heads": 4}
    >>> EncoderDecoderConfig(**sizes, num_encoder_layers=2, num_decoder_layers=3).num_blocks
    5
    """

    RARE: ClassVar = RARE

    vocab: int
    seq: int
    embed: int
    num_encoder_layers: int
    num_decoder_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp: int | None = None
    positions: Literal["learned", "rotary", "relative"] = "learned"
    theta: float = 10_000.0
    norm: Norms = "layernorm"
    eps: float = 1e-5
    activation: Activations = "gelu"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    remat: Remats = "weights"
    dtype: Dtypes = "float32"
    attention: Attentions = "auto"
    loss_chunk: int | None = None
    lora: str = ""
    products: Products = ""
    relative_buckets: int | None = None
    relative_distance: int | None = None
    query_scale: float | None = None
    head_scale: float | None = None

    def __post_init__(self):
        checks.refuse("EncoderDecoderConfig", problems(self) + encoder_decoder_problems(self))

    @property
    def num_blocks(self) -> int:
        """Blocks of the encoder and of the decoder."""
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def distances(self) -> tuple[int, int]:
        """Buckets of relative positions, and from where on there is but one, with the defaults filled in."""
        buckets, furthest = self.relative_buckets, self.relative_distance
        return 32 if buckets is None else buckets, 128 if furthest is None else furthest

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name, with the defaults filled in."""
        return block_sizes(self)

    @property
    def parts(self) -> DecoderConfig:
        """Options of the parts of a block."""
        same = {name: value for name, value in vars(self).items() if name not in OWN}
        # relative positions are nothing that a part of a block knows
        positions = "rotary" if self.positions == "rotary" else "learned"
        return DecoderConfig(num_layers=self.num_blocks, positions=positions, **same)

    def __call__(self, rngs: nnx.Rngs) -> "EncoderDecoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return EncoderDecoder(self, rngs=rngs)


class EncoderDecoder(nnx.Module):
    """Token ids of two sequences to logits of the second. `nnx.view(model, deterministic=True)`: no dropout.

    A call is the composition of its parts: `first`, then `run` on `blocks` with `block_keys`, then `last`.
    """

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
        self.source_relative = relative_table(*shape, rngs) if relative else None
        self.target_relative = relative_table(*shape, rngs) if relative else None
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
        self.final_norm = norm_of(parts)
        self.head = None if config.tied else linear_of(parts, (EMBED,), (VOCAB,), rngs, bias=False)
        self.dropout = nnx.Dropout(config.dropout)
        self.rngs = rngs["dropout"].fork() if config.dropout else None

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
          source_BS: int token ids below `vocab`; S is at most `seq`. An id out of range gives NaN. None with
            a cache that has the source.
          target_BT: int token ids, the same; a position is predicted from the source and the target before
            it and at it.
          source_mask_BS: 0 for padding of the source, which no position sees; by default there is none.
          cache: of the source and the target's tokens before these, see `source_cache.read_target`;
            `NewCache` begins one.
          counts_B: with a cache, how many of the target's tokens each row has.

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
        if self._keys() is not None and self.rngs is not None:
            self.rngs()  # the next call has masks of its own
        return logits_BTV

    def first(
        self, source_BS: jax.Array, target_BT: jax.Array, source_mask_BS: jax.Array | None = None
    ) -> Stream:
        """Look up tokens and positions of both sequences: the residual streams that enter the blocks."""
        # one key for both embeddings, split between them
        keys = self._keys()
        source_key, target_key = split_key(None if keys is None else keys[0], 2)
        stream = {
            "source": self.embedded(source_BS, self.source_positions, source_key),
            "target": self.embedded(target_BT, self.target_positions, target_key),
        }
        if source_mask_BS is not None:
            stream["source_mask"] = source_mask_BS
        for name, table in (("source_bias", self.source_relative), ("target_bias", self.target_relative)):
            if (table_BNH := self.distances_of(table, source_BS.shape[0])) is not None:
                stream[name] = table_BNH
        return stream

    def distances_of(self, table: nnx.Param | None, rows: int) -> jax.Array | None:
        """Return a table of relative positions for each example: so every part of a pipeline has it."""
        if table is None:
            return None
        table_NH = at_use(table, (None, HEADS), "float32")
        table_BNH = jnp.broadcast_to(table_NH, (rows, *table_NH.shape))
        return with_logical_constraint(table_BNH, (BATCH, None, HEADS))

    def block_keys(self) -> jax.Array | None:
        """The keys of the blocks' dropout, (num_blocks,); None where it is off."""
        keys = self._keys()
        return None if keys is None else keys[1:]

    def run(self, blocks: Sequence[Any], stream: Stream, keys: jax.Array | None) -> Stream:
        """Apply blocks to the activations, in order: all, or those of a pipeline stage."""
        for i, block in enumerate(blocks):
            stream = block(stream, None if keys is None else keys[i])
        return stream

    def last(self, stream: Stream) -> jax.Array:
        """Return the float32 logits, rounded to dtype: the target's normed activations times vocabulary."""
        x_BTD = whole_seq(self.final_norm(stream["target"]))
        if self.config.head_scale is not None:
            x_BTD *= jnp.asarray(self.config.head_scale, x_BTD.dtype)
        return logits_of(self.config.parts, x_BTD, self.head, self.embedding)

    def _keys(self) -> jax.Array | None:
        """Return one key for the embeddings and one for each block, the same within a call."""
        if self.rngs is None or self.dropout.deterministic:
            return None
        return coming_keys(self.rngs, self.config.num_blocks + 1)

    def embedded(
        self, tokens_BT: jax.Array, table: nnx.Param | None, key: jax.Array | None, positions_BT: Any = None
    ) -> jax.Array:
        """Look up tokens, and their positions in a table, from 0 on or those given."""
        if tokens_BT.shape[1] > self.config.seq:
            raise ValueError(too_long(tokens_BT.shape[1], self.config.seq))
        x_BTD = looked_up(at_use(self.embedding, TABLE, self.config.dtype), tokens_BT)
        if table is not None:
            table_SD = at_use(table, (SEQ, EMBED), self.config.dtype)
            x_BTD = rows_last(x_BTD + positions_of(table_SD, tokens_BT.shape[1], None, positions_BT))
        return with_logical_constraint(self.dropout(with_logical_constraint(x_BTD, STREAM), rngs=key), STREAM)
