"""A causal decoder of the GPT and Llama families in nnx: `DecoderConfig` is the factory, `Decoder` the model.

Blocks are stacked along the dim layers, whether they are scanned or unrolled, so both have the
same parameters. The model names dims and knows no mesh; `layers.py` has its parts, `huggingface.py` loads
pretrained ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from shardtrain.axes import (
    BATCH,
    EMBED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MLP,
    RESIDUAL_SEQ,
    SEQ,
    VOCAB,
)
from shardtrain.models import checks
from shardtrain.models.layers import (
    Attentions,
    Dims,
    Linear,
    Norm,
    Norms,
    at_use,
    attend,
    coming_keys,
    normal,
    rotate,
)

Positions = Literal["learned", "rotary"]
Activations = Literal["gelu", "gelu_erf", "swiglu"]
Remats = Literal["none", "weights", "dots", "outputs", "full"]
Dtypes = Literal["float32", "bfloat16"]

STREAM = (BATCH, RESIDUAL_SEQ, EMBED)
TABLE = (VOCAB, EMBED)
BLOCK_OUTPUT = "block_output"


CHEAP = ("sharding_constraint", "convert_element_type", "concatenate", "stack", "reshape", "broadcast_in_dim")
"""Steps between a stored weight and its use: what gathers, casts and joins."""


def _not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in CHEAP


REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "weights": _not_gathered,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "outputs": jax.checkpoint_policies.save_only_these_names(BLOCK_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


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

    def __post_init__(self):
        checks.refuse("DecoderConfig", problems(self))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name, with the defaults filled in."""
        return {LAYERS: self.num_layers, **block_sizes(self)}

    def __call__(self, rngs: nnx.Rngs) -> "Decoder":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Decoder(self, rngs=rngs)


def block_sizes(config: Any) -> dict[str, int]:
    """Return the size of each dim, by name, with the defaults of `DecoderConfig` filled in."""
    return {
        VOCAB: config.vocab,
        SEQ: config.seq,
        EMBED: config.embed,
        HEADS: config.num_heads,
        KV_HEADS: config.num_heads if config.num_kv_heads is None else config.num_kv_heads,
        HEAD_DIM: config.embed // config.num_heads if config.head_dim is None else config.head_dim,
        MLP: 4 * config.embed if config.mlp is None else config.mlp,
    }


def problems(config: Any) -> list[str]:
    """List the problems of a configuration: single values first, then the relations between sizes."""
    counts = {f.name: getattr(config, f.name) for f in fields(config) if f.type in (int, int | None)}
    found = checks.positive({name: value for name, value in counts.items() if value is not None})
    if not found:
        sizes = block_sizes(config)
        found += checks.multiple("num_heads", config.num_heads, "num_kv_heads", sizes[KV_HEADS])
        if config.head_dim is None:
            found += checks.multiple("embed", config.embed, "num_heads", config.num_heads)
        if config.positions == "rotary" and sizes[HEAD_DIM] % 2:
            odd = sizes[HEAD_DIM]
            found.append(f"head_dim is {odd}; rotary positions turn pairs. Use head_dim={odd + 1}.")
    found += checks.positive({"theta": float(config.theta), "eps": float(config.eps)})
    found += checks.dropout_rate("dropout", config.dropout)
    choices = {f.name: get_args(f.type) for f in fields(config) if get_args(f.type) and f.name not in counts}
    for name, allowed in choices.items():
        found += checks.choice(name, getattr(config, name), allowed)
    return found


class Attention(nnx.Module):
    """Self-attention, causal or bidirectional, on the normed residual stream (batch, seq, embed)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, causal: bool = True):
        self.config, self.causal = config, causal
        self.q = linear_of(config, (EMBED,), (HEADS, HEAD_DIM), rngs)
        self.k = linear_of(config, (EMBED,), (KV_HEADS, HEAD_DIM), rngs)
        self.v = linear_of(config, (EMBED,), (KV_HEADS, HEAD_DIM), rngs)
        self.o = linear_of(config, (HEADS, HEAD_DIM), (EMBED,), rngs)

    def __call__(self, x_BTD: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        q_BTHK, k_BSHK, v_BSHK = self.projected(x_BTD)
        if self.config.positions == "rotary":
            q_BTHK, k_BSHK = rotate(q_BTHK, self.config.theta), rotate(k_BSHK, self.config.theta)
        y_BTHK = attend(q_BTHK, k_BSHK, v_BSHK, self.config.attention, causal=self.causal, mask_BS=mask_BS)
        y_BTHK = with_logical_constraint(y_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM))
        return to_stream(self.o, y_BTHK)

    def projected(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries, keys and values by one product, whose gradient is then reduced over devices once.

        Beside each key and value head stand the query heads that share it: all are split over devices alike.
        """
        sizes = self.config.sizes
        group = (sizes[KV_HEADS], -1, sizes[HEAD_DIM])
        kernels = [linear.cast().reshape(sizes[EMBED], *group) for linear in (self.q, self.k, self.v)]
        kernel = with_logical_constraint(jnp.concatenate(kernels, 2), (EMBED, KV_HEADS, None, HEAD_DIM))
        y = with_logical_constraint(jnp.tensordot(x_BTD, kernel, 1), (BATCH, SEQ, KV_HEADS, None, HEAD_DIM))
        parts = jnp.split(y, [kernel.shape[2] - 2, kernel.shape[2] - 1], axis=3)
        q_BTHK, k_BSHK, v_BSHK = (
            linear.shifted(part.reshape(*x_BTD.shape[:2], -1, sizes[HEAD_DIM]))
            for linear, part in zip((self.q, self.k, self.v), parts, strict=True)
        )
        return (
            with_logical_constraint(q_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM)),
            with_logical_constraint(k_BSHK, (BATCH, SEQ, KV_HEADS, HEAD_DIM)),
            with_logical_constraint(v_BSHK, (BATCH, SEQ, KV_HEADS, HEAD_DIM)),
        )


class FeedForward(nnx.Module):
    """Two or three projections around an activation, from (batch, seq, embed) back to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.approximate = config.activation == "gelu"
        self.up = linear_of(config, (EMBED,), (MLP,), rngs)
        self.gate = linear_of(config, (EMBED,), (MLP,), rngs) if config.activation == "swiglu" else None
        self.down = linear_of(config, (MLP,), (EMBED,), rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.gate is None:
            h_BTF = with_logical_constraint(self.up(x_BTD), (BATCH, SEQ, MLP))
            h_BTF = jax.nn.gelu(h_BTF, approximate=self.approximate)
        else:
            # one product for both, as for queries, keys and values
            kernel = jnp.stack([self.up.cast(), self.gate.cast()], 1)
            y = jnp.tensordot(x_BTD, with_logical_constraint(kernel, (EMBED, None, MLP)), 1)
            y = with_logical_constraint(y, (BATCH, SEQ, None, MLP))
            h_BTF = self.up.shifted(y[:, :, 0]) * jax.nn.silu(self.gate.shifted(y[:, :, 1]))
        return to_stream(self.down, h_BTF)


class Block(nnx.Module):
    """Pre-norm residual block. It has parameters only: the key of its dropout is an argument."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        halves = (self.attention_norm, self.attention), (self.mlp_norm, self.mlp)
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
        table = partial(normal, sizes=config.sizes, std=0.02, rngs=rngs)
        self.embedding = table(TABLE)
        self.positions = table((SEQ, EMBED)) if config.positions == "learned" else None
        self.blocks = stacked_blocks(Block, config, rngs)
        self.final_norm = norm_of(config)
        self.head = None if config.tied else linear_of(config, (EMBED,), (VOCAB,), rngs, bias=False)
        self.dropout = nnx.Dropout(config.dropout)
        self.rngs = rngs["dropout"].fork() if config.dropout else None

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Predict the next token at every position.

        Args:
          tokens_BT: int token ids below `vocab`; T is at most `seq`. An id out of range gives NaN.

        Returns:
          Logits (batch, seq, vocab), float32.

        Raises:
          ValueError: if T is above `seq`.
        """
        logits_BTV = self.last(self.run(self.blocks, self.first(tokens_BT), self.block_keys()))
        if self._keys() is not None and self.rngs is not None:
            self.rngs()  # the next call has masks of its own
        return logits_BTV

    def first(self, tokens_BT: jax.Array) -> jax.Array:
        """Look up tokens and positions: the residual stream (batch, seq, embed) that enters the blocks."""
        if tokens_BT.shape[1] > self.config.seq:
            raise ValueError(too_long(tokens_BT.shape[1], self.config.seq))
        x_BTD = jnp.take(at_use(self.embedding, TABLE, self.config.dtype), tokens_BT, axis=0)
        if self.positions is not None:
            x_BTD += at_use(self.positions, (SEQ, EMBED), self.config.dtype)[: tokens_BT.shape[1]]
        x_BTD = with_logical_constraint(x_BTD, STREAM)
        keys = self._keys()
        return with_logical_constraint(self.dropout(x_BTD, rngs=None if keys is None else keys[0]), STREAM)

    def block_keys(self) -> jax.Array | None:
        """The keys of the blocks' dropout, (num_layers,); None where it is off."""
        keys = self._keys()
        return None if keys is None else keys[1:]

    def _keys(self) -> jax.Array | None:
        """Return one key for the embedding and one for each block, the same within a call."""
        if self.rngs is None or self.dropout.deterministic:
            return None
        return coming_keys(self.rngs, self.config.num_layers + 1)

    def run(self, blocks: Block, x_BTD: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Apply stacked blocks to the residual stream (all, or those of a pipeline stage)."""

        # made anew at each call: jax.checkpoint keeps traces by function, whatever rules they were made under
        def run_block(block: Block, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
            return block(x_BTD, key)

        return walk(self.config, run_block, blocks, x_BTD, keys)

    def last(self, x_BTD: jax.Array) -> jax.Array:
        """Return the float32 logits, rounded to dtype: the normed residual stream times the vocabulary."""
        x_BTD = whole_seq(self.final_norm(x_BTD))
        if self.head is not None:
            logits_BTV = self.head(x_BTD)
        else:
            logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, at_use(self.embedding, TABLE, self.config.dtype))
        return with_logical_constraint(logits_BTV.astype(jnp.float32), (BATCH, SEQ, VOCAB))


def to_stream(linear: Any, x: jax.Array) -> jax.Array:
    """Project onto the residual stream: reduced over tensor, or reduce-scattered along a sharded sequence.

    The product is constrained unsharded first, so that the backward pass gathers its gradient once.
    """
    y_BTD = with_logical_constraint(linear.product(x), (BATCH, SEQ, EMBED))
    return with_logical_constraint(linear.shifted(with_logical_constraint(y_BTD, STREAM)), STREAM)


def whole_seq(x_BTD: jax.Array) -> jax.Array:
    """All-gather a norm's output along a sharded sequence, after it was computed on shards.

    Both constraints are needed: the backward pass then reduces the norm's bias from shards. A checkpoint
    name makes remat "weights" keep it instead of gathering it again.
    """
    x_BTD = with_logical_constraint(with_logical_constraint(x_BTD, STREAM), (BATCH, SEQ, EMBED))
    return checkpoint_name(x_BTD, "whole_seq")


def linear_of(
    config: DecoderConfig, into: Dims, out: Dims, rngs: nnx.Rngs, *, bias: bool | None = None
) -> Linear:
    """Make a projection initialised as in GPT-2: smaller where it writes to the residual stream."""
    std = 0.02 / math.sqrt(2 * config.num_layers) if out == (EMBED,) else 0.02
    bias = config.bias if bias is None else bias
    return Linear(into, out, sizes=config.sizes, std=std, bias=bias, dtype=config.dtype, rngs=rngs)


def norm_of(config: DecoderConfig) -> Norm:
    return Norm(config.norm, config.embed, eps=config.eps, bias=config.bias, dtype=config.dtype)


def stacked_blocks(kind: Any, config: DecoderConfig, rngs: nnx.Rngs) -> Any:
    """Make one module of this kind with the parameters of all blocks, stacked along a first dim layers."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: LAYERS})
    def stack(rngs: nnx.Rngs) -> Any:
        return kind(config, rngs=rngs)

    return stack(nnx.Rngs(params=rngs.params()))


def walk(
    config: DecoderConfig,
    run_block: Callable[[Any, jax.Array, jax.Array | None], jax.Array],
    blocks: Any,
    x_BTD: jax.Array,
    keys: jax.Array | None,
) -> jax.Array:
    """Apply stacked blocks to a residual stream, scanned or unrolled, with the remat policy `remat`.

    Args:
      config: for `scan` and `remat`.
      run_block: (block, stream, key) -> stream; a new function at each call.
      blocks: stacked along the first dim of every parameter.
      x_BTD: what enters the first.
      keys: of the blocks' dropout, one each; None where it is off.
    """
    if config.remat != "none":
        policy = REMAT_POLICIES[config.remat]
        run_block = jax.checkpoint(run_block, policy=policy, prevent_cse=not config.scan)
    if config.scan:
        return jax.lax.scan(lambda x, block: (run_block(block[0], x, block[1]), None), x_BTD, (blocks, keys))[
            0
        ]
    for block, key in _unstacked((blocks, keys)):
        x_BTD = run_block(block, x_BTD, key)
    return x_BTD


def _unstacked(tree: Any) -> list[Any]:
    """Split a pytree along the first dim of its leaves; the gradient of `split` is one concatenation."""
    leaves, treedef = jax.tree.flatten(tree)
    num_slices = leaves[0].shape[0]
    pieces = [[jnp.squeeze(piece, 0) for piece in jax.lax.split(leaf, [1] * num_slices)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, slices) for slices in zip(*pieces, strict=True)]


def too_long(num_tokens: int, seq: int) -> str:
    """Return the error text for more tokens than positions."""
    return (
        f"tokens of length {num_tokens} were given to a decoder of seq={seq} positions. "
        f"Give at most {seq} tokens, or build it with seq={num_tokens}."
    )


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
    heads_and_kv = 2 * size[HEADS] + 2 * size[KV_HEADS]
    num_projections = 3 if config.activation == "swiglu" else 2
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
