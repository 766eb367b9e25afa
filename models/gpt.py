"""A whole GPT in one file: plain Flax and jax, and names on the dims of its arrays. Copy it and change it.

It knows no mesh, no pipeline and no trainer. `decoder.py` has options, caches and weights of Hugging Face.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, HEAD_DIM, HEADS, LAYERS, MLP, SEQ, VOCAB


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Sizes of a GPT; called with `nnx.Rngs` it builds the model.

    Args:
      vocab: number of tokens in the vocabulary.
      seq: largest number of positions.
      embed: features of each position between blocks.
      num_layers: number of blocks.
      num_heads: attention heads; they divide `embed`.
      dropout: rate on the outputs of attention and feed-forward.

    Raises:
      ValueError: a size is below 1, a rate is not in [0, 1), or `num_heads` does not divide `embed`.

    >>> gpt = GptConfig(vocab=256, seq=16, embed=32, num_layers=2, num_heads=4)(nnx.Rngs(0))
    >>> gpt(jnp.zeros((3, 16), int)).shape
    (3, 16, 256)
    """

    vocab: int
    seq: int
    embed: int
    num_layers: int
    num_heads: int
    dropout: float = 0.0

    def __post_init__(self):
        sizes = (self.vocab, self.seq, self.embed, self.num_layers, self.num_heads)
        if min(sizes) < 1 or not 0 <= self.dropout < 1 or self.embed % self.num_heads:
            raise ValueError(f"{self}: sizes are 1 or more, num_heads divides embed, dropout is in [0, 1)")

    def __call__(self, rngs: nnx.Rngs) -> "Gpt":
        """Build the model; `rngs` has the streams "params" and "dropout"."""
        return Gpt(self, rngs)


def init_weight(rngs: nnx.Rngs, std: float, dims: dict[str | None, int]) -> nnx.Param:
    """Draw a weight from a normal distribution; `dims` are the names and sizes of its dims."""
    return name_dims(std * jax.random.normal(rngs.params(), tuple(dims.values())), *dims)


def name_dims(values: jax.Array, *dims: str | None) -> nnx.Param:
    """Make a parameter whose dims have names; a run decides which mesh axes shard them."""
    return nnx.Param(values, out_sharding=dims, eager_sharding=False)


def norm(x_BTD: jax.Array, scale_D: nnx.Param) -> jax.Array:
    """Divide features by their root mean square, and scale them (RMSNorm, Zhang and Sennrich 2019)."""
    x = x_BTD.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return (x * scale_D[...]).astype(x_BTD.dtype)


class Block(nnx.Module):
    """Causal attention and a feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs):
        D, hidden, std = config.embed, {MLP: 4 * config.embed}, config.embed**-0.5
        heads = {HEADS: config.num_heads, HEAD_DIM: D // config.num_heads}
        small = std * (2 * config.num_layers) ** -0.5  # so that the residual stream does not grow with depth
        self.attention_norm = name_dims(jnp.ones(D), EMBED)
        self.qkv = init_weight(rngs, std, {None: 3, EMBED: D, **heads})
        self.out = init_weight(rngs, small, {**heads, EMBED: D})
        self.mlp_norm = name_dims(jnp.ones(D), EMBED)
        self.up = init_weight(rngs, std, {EMBED: D, **hidden})
        self.down = init_weight(rngs, small / 2, {**hidden, EMBED: D})
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        y_BTD = self.attend(norm(x_BTD, self.attention_norm))
        x_BTD = with_logical_constraint(x_BTD + self.dropout(y_BTD, rngs=keys[0]), (BATCH, SEQ, EMBED))
        y_BTD = self.feed_forward(norm(x_BTD, self.mlp_norm))
        return with_logical_constraint(x_BTD + self.dropout(y_BTD, rngs=keys[1]), (BATCH, SEQ, EMBED))

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Add up the values of earlier positions, weighted by attention."""
        # the constraint of a weight is where a sharded one is gathered
        qkv_CDHK = with_logical_constraint(self.qkv[...], (None, EMBED, HEADS, HEAD_DIM))
        out_HKD = with_logical_constraint(self.out[...], (HEADS, HEAD_DIM, EMBED))
        q_BTHK, k_BTHK, v_BTHK = jnp.einsum("BTD,CDHK->CBTHK", x_BTD, qkv_CDHK)
        y_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True)
        y_BTHK = with_logical_constraint(y_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM))
        return jnp.einsum("BTHK,HKD->BTD", y_BTHK, out_HKD)

    def feed_forward(self, x_BTD: jax.Array) -> jax.Array:
        """Apply two linear layers with a GELU between them."""
        h_BTF = x_BTD @ with_logical_constraint(self.up[...], (EMBED, MLP))
        h_BTF = nnx.gelu(with_logical_constraint(h_BTF, (BATCH, SEQ, MLP)))
        return h_BTF @ with_logical_constraint(self.down[...], (MLP, EMBED))


class Gpt(nnx.Module):
    """Tokens to logits: `first`, then `run` over the blocks, then `last`; a pipeline calls these parts."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs):
        self.config = config
        self.tokens = init_weight(rngs, config.embed**-0.5, {VOCAB: config.vocab, EMBED: config.embed})
        self.positions = init_weight(rngs, 0.02, {SEQ: config.seq, EMBED: config.embed})
        # the parameters of all blocks are stacked along a first dim
        stack = nnx.vmap(Block, in_axes=(None, 0), transform_metadata={nnx.PARTITION_NAME: LAYERS})
        self.blocks = nnx.split_rngs(splits=config.num_layers)(stack)(config, nnx.Rngs(params=rngs.params()))
        self.norm = name_dims(jnp.ones(config.embed), EMBED)
        self.dropout = nnx.Dropout(config.dropout)
        self.stream = rngs["dropout"].fork()

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Compute logits (batch, seq, vocab), float32, of the token after each of at most `seq` positions."""
        if (keys := self.block_keys()) is not None:
            self.stream()  # so that the next call has other keys
        return self.last(self.run(self.blocks, self.first(tokens_BT), keys))

    def first(self, tokens_BT: jax.Array) -> jax.Array:
        """Look up tokens and add positions."""
        table_VD = with_logical_constraint(self.tokens[...], (VOCAB, EMBED))
        # in float32 the gradients of a frequent token are added without loss
        x_BTD = table_VD.astype(jnp.float32)[tokens_BT].astype(table_VD.dtype)
        return with_logical_constraint(x_BTD + self.positions[: tokens_BT.shape[1]], (BATCH, SEQ, EMBED))

    def block_keys(self) -> jax.Array | None:
        """Split a key of dropout for each block; None means no dropout."""
        if self.dropout.deterministic or not self.config.dropout:
            return None
        key = jax.random.fold_in(self.stream.key[...], self.stream.count[...])
        return jax.random.split(key, self.config.num_layers)

    def run(self, blocks: Block, x_BTD: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Apply stacked blocks, all or those of a pipeline stage, one after the other."""
        return jax.lax.scan(lambda x, each: (each[0](x, each[1]), None), x_BTD, (blocks, keys))[0]

    def last(self, x_BTD: jax.Array) -> jax.Array:
        """Compute logits with the table of tokens."""
        logits_BTV = norm(x_BTD, self.norm) @ with_logical_constraint(self.tokens[...], (VOCAB, EMBED)).T
        return with_logical_constraint(logits_BTV, (BATCH, SEQ, VOCAB)).astype(jnp.float32)
