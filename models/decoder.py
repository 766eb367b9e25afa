"""A causal decoder of the GPT and Llama families in nnx: `DecoderConfig` is the factory, `Decoder` the model.

Blocks are stacked along the dim layers, whether they are scanned or unrolled, so both have the same
parameters. The model names dims and knows no mesh; `transformer.py` has its parts, `huggingface/` loads
pretrained ones.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import EMBED, LAYERS, SEQ, VOCAB
from shardtrain.models import checks
from shardtrain.models.attention import Attentions
from shardtrain.models.block_stack import stacked_blocks, walk
from shardtrain.models.decoder_block import Block, OfBlock, Stream
from shardtrain.models.experts_options import read_experts
from shardtrain.models.experts_routing import REPLICAS, move_bias, no_counts, routing_of, with_block
from shardtrain.models.float8 import Products
from shardtrain.models.key_value_cache import KeyValueCache, NewCache, read
from shardtrain.models.layers import Norms, at_use, coming_keys, looked_up, normal, positions_of
from shardtrain.models.on_gpus import rows_last
from shardtrain.models.residual_stream import STREAM, whole_seq
from shardtrain.models.transformer import TABLE, linear_of, logits_of, norm_of, too_long
from shardtrain.models.transformer_options import (
    RARE,
    Activations,
    Dtypes,
    Positions,
    Remats,
    block_sizes,
    decoder_problems,
    problems,
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
      rope_scaling: stretched wavelengths, for longer sequences, as "llama3:factor=8,original_seq=8192",
        "yarn:factor=4,original_seq=32768", "linear:factor=4", or "longrope:..." with factors for short and
        for long rows or caches. Empty: they stay.
      rotary_dims: features of each head that are rotated, the first ones. None: all.
      norm: kind of norm before the halves of a block and the head; "rmsnorm_plus_one" adds 1 to its scale.
      post_norm: whether each half of a block also has a norm behind it, before it is added.
      only_post_norm: whether the norms before the halves are left out (as OLMo 2).
      parallel: whether both halves of a block read what enters it (as GPT-NeoX), in place of one after the
        other.
      qk_norm: whether each head of queries and keys is normed, before positions.
      qk_norm_joint: whether that norm is over all heads together.
      eps: added to the variance in the norms.
      activation: "gelu" (tanh approximation, as GPT-2), "gelu_erf" (exact, as BERT), "relu", or with a
        second, gating projection "swiglu" or "geglu" (the same tanh approximation, as Gemma).
      bias: whether projections and layer norms have biases (the head has none).
      attention_bias: whether the projections of attention have biases. None: as `bias`.
      qkv_bias: whether those of queries, keys and values have biases. None: as `attention_bias`.
      norm_bias: whether layer norms have biases. None: as `bias`.
      query_scale: factor of the scores of attention. None: one over the root of head_dim.
      soft_cap: scores x become soft_cap * tanh(x / soft_cap), not by "cudnn". None: they stay.
      logits_soft_cap: the same of the logits.
      embed_scale: factor of the embedded tokens; None: 1.
      tied: whether the head is the embedding table.
      dropout: rate on the embedding and on the outputs of attention and feed-forward, from the rng stream
        "dropout".
      remat: what the backward pass recomputes. "none": nothing. "weights": only casts and copies, so that no
        gathered weight is kept for it. "dots": all but matrix products. "outputs": all but the outputs of
        attention and feed-forward, which tensor parallelism reduces over devices. "full": all but the input
        of a block. "offload": likewise, and that input waits in the memory of the host.
      scan: run the blocks in `jax.lax.scan` (compile time does not grow with their number; up to 8 are plain
        code on one CPU), or unroll them.
      dtype: compute dtype; parameters, norms, softmax and logits are float32.
      attention: "xla"; "cudnn", flash attention on NVIDIA GPUs; or "auto": "cudnn" where device, dtype and
        head_dim allow it, else "xla".
      window: how many tokens a token sees, itself and those just before it (sliding window). None: all.
      full_every: 6 is five blocks with the window, then one without. None: all have it.
      window_theta: base of the rotary wavelengths, unscaled, in blocks with the window. None: as in others.
      loss_chunk: number of tokens of a device whose logits exist at the same time, in the loss and its
        gradient. None: all of them.
      lora: low-rank adapters of the blocks' projections, as "rank=8" or "rank=8,alpha=16,on=q+v"; then they
        alone are trained. Empty: none.
      products: "float8": the blocks' matrix products with operands rounded to 8 bits, for NVIDIA GPUs from
        Ada on; the gradients of kernels, attention and the head stay in `dtype`. Empty: all in `dtype`.
      experts: a mixture of experts in the place of each block's feed-forward, as "num=8,top=2" with any of
        capacity, shared, scores, normalised, scale, balance, over, bias, z, shared_gate, groups and
        top_groups; `mlp` is the hidden features of one expert. Empty: none.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.

    >>> config = DecoderConfig(vocab=256, seq=32, embed=64, num_layers=2, num_heads=4)
    >>> config.sizes["head_dim"], config.sizes["mlp"]
    (16, 256)
    """

    RARE: ClassVar = RARE

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
    rope_scaling: str = ""
    rotary_dims: int | None = None
    norm: Norms = "layernorm"
    eps: float = 1e-5
    post_norm: bool = False
    only_post_norm: bool = False
    parallel: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    activation: Activations = "gelu"
    bias: bool = True
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    norm_bias: bool | None = None
    query_scale: float | None = None
    soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embed_scale: float | None = None
    tied: bool = True
    dropout: float = 0.0
    remat: Remats = "weights"
    scan: bool = True
    dtype: Dtypes = "float32"
    attention: Attentions = "auto"
    window: int | None = None
    full_every: int | None = None
    window_theta: float | None = None
    loss_chunk: int | None = None
    lora: str = ""
    products: Products = ""
    experts: str = ""

    def __post_init__(self):
        checks.refuse("DecoderConfig", problems(self) + decoder_problems(self))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name, with the defaults filled in."""
        return {LAYERS: self.num_layers, **block_sizes(self)}

    def __call__(self, rngs: nnx.Rngs) -> "Decoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Decoder(self, rngs=rngs)


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
        experts = read_experts(config.experts)
        # its losses and its bias need sums over replicas, which the functions of the model are given by this
        self.axis_name = REPLICAS if experts and experts.over_replicas else None
        # a random stream of the model's own: each call draws other masks
        self.dropout = nnx.Dropout(config.dropout)
        self.rngs = rngs["dropout"].fork() if config.dropout else None

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
          segments_BT: int, the number of each token's document, where a row has several: a position sees its
            own document only, and positions begin again in each; by default a row is one.
          cache: of the tokens before these, see `key_value_cache.read`; `NewCache` begins one.
          counts_B: with a cache, how many of the tokens each row has.
          auxiliary: whether to return what the routers of a mixture of experts did beside the logits.

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
        if self._keys() is not None and self.rngs is not None:
            self.rngs()  # the next call has masks of its own
        return outputs

    def first(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None, positions_BT: Any = None
    ) -> Stream:
        """Look up tokens and positions (see `positions_of`): the residual stream that enters the blocks."""
        if tokens_BT.shape[1] > self.config.seq:
            raise ValueError(too_long(tokens_BT.shape[1], self.config.seq))
        x_BTD = looked_up(at_use(self.embedding, TABLE, self.config.dtype), tokens_BT)
        if self.config.embed_scale is not None:
            x_BTD *= jnp.asarray(self.config.embed_scale, x_BTD.dtype)
        if self.positions is not None:
            table = at_use(self.positions, (SEQ, EMBED), self.config.dtype)
            x_BTD = rows_last(x_BTD + positions_of(table, tokens_BT.shape[1], segments_BT, positions_BT))
        keys = self._keys()
        x_BTD = with_logical_constraint(x_BTD, STREAM)
        x_BTD = with_logical_constraint(self.dropout(x_BTD, rngs=None if keys is None else keys[0]), STREAM)
        stream: dict[str, Any] = {} if segments_BT is None else {"segments": segments_BT}
        if experts := read_experts(self.config.experts):
            stream["routers"] = no_counts(experts, len(x_BTD), self.config.num_layers)
        return {"x": x_BTD, **stream} if stream else x_BTD

    def block_keys(self) -> jax.Array | OfBlock | None:
        """The keys of the blocks' dropout, (num_layers,), None where it is off; more where blocks differ."""
        keys = None if (found := self._keys()) is None else found[1:]
        if (every := self.config.full_every) is None:
            return keys
        return OfBlock(keys, jnp.arange(1, 1 + self.config.num_layers) % every == 0)

    def _keys(self) -> jax.Array | None:
        """Return one key for the embedding and one for each block, the same within a call."""
        if self.rngs is None or self.dropout.deterministic:
            return None
        return coming_keys(self.rngs, self.config.num_layers + 1)

    def run(self, blocks: Block, stream: Stream, keys: jax.Array | OfBlock | None) -> Stream:
        """Apply stacked blocks to the residual stream: all, or those of a pipeline stage, with their keys."""
        assert self.config.full_every is None or isinstance(keys, OfBlock), "give what block_keys() returns"
        parts = stream if isinstance(stream, dict) else {"x": stream}

        # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
        def run_block(block: Block, carry: Any, key: jax.Array | OfBlock | None) -> Any:
            x_BTD = block(carry["x"], key, parts.get("segments"))
            if "routers" not in carry:
                return {"x": x_BTD}
            x_BTD, of_block = x_BTD
            return {"x": x_BTD, "routers": with_block(carry["routers"], of_block)}

        carried = {name: parts[name] for name in ("x", "routers") if name in parts}
        carried = walk(self.config, run_block, blocks, carried, keys)
        return {**stream, **carried} if isinstance(stream, dict) else carried["x"]

    def last(self, stream: Stream, *, auxiliary: bool = False) -> Any:
        """Return the float32 logits, rounded to dtype; with `auxiliary` also the `Routing`."""
        x_BTD = stream["x"] if isinstance(stream, dict) else stream
        logits_BTV = logits_of(self.config, whole_seq(self.final_norm(x_BTD)), self.head, self.embedding)
        return (logits_BTV, routing_of(self.config.experts, stream)) if auxiliary else logits_BTV


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
