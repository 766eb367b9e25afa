"""A language model for tests of runs: small in work and above all in what there is to trace and compile.

It has all that a run shards: named dims, stacked blocks of which a pipeline cuts stages, dropout. A run of it
starts in a third of the time of one of `models.decoder`, whose attention has tests of its own.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, LAYERS, MLP, SEQ, VOCAB
from shardtrain.models.layers import normal, peek_keys

SIZES: tuple[str, ...] = (VOCAB, EMBED, MLP, LAYERS)


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Sizes; called with `nnx.Rngs` it builds the model."""

    vocab: int = 256
    seq: int = 8
    embed: int = 8
    mlp: int = 16
    num_layers: int = 1
    dropout: float = 0.0
    tied: bool = True

    def __call__(self, rngs: nnx.Rngs) -> "TinyModel":
        return TinyModel(self, rngs)


class Blocks(nnx.Module):
    """The parameters of all blocks, stacked."""

    def __init__(self, sizes, rngs):
        self.up = normal((LAYERS, EMBED, MLP), sizes=sizes, std=sizes[EMBED] ** -0.5, rngs=rngs)
        self.down = normal((LAYERS, MLP, EMBED), sizes=sizes, std=0.5 * sizes[MLP] ** -0.5, rngs=rngs)


class TinyModel(nnx.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab): a table, residual blocks, and a head."""

    def __init__(self, config: TinyConfig, rngs: nnx.Rngs):
        self.config = config
        sizes = dict(zip(SIZES, (config.vocab, config.embed, config.mlp, config.num_layers), strict=True))
        self.embedding = normal((VOCAB, EMBED), sizes=sizes, std=0.1, rngs=rngs)
        self.blocks = Blocks(sizes, rngs)
        self.head = None if config.tied else normal((EMBED, VOCAB), sizes=sizes, std=0.1, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.rngs = rngs["dropout"].fork() if config.dropout else None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.last(self.run(self.blocks, self.first(tokens), self.block_keys()))

    def first(self, tokens: jax.Array) -> jax.Array:
        x = jnp.take(with_logical_constraint(self.embedding[...], (VOCAB, EMBED)), tokens, axis=0)
        return with_logical_constraint(x, (BATCH, SEQ, EMBED))

    def block_keys(self) -> jax.Array | None:
        if self.rngs is None or self.dropout.deterministic:
            return None
        return peek_keys(self.rngs, self.config.num_layers)

    def run(self, blocks: Blocks, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        def block(x, of_block):
            up, down, key = of_block
            h = with_logical_constraint(jax.nn.relu(x @ up), (BATCH, SEQ, MLP))
            return with_logical_constraint(x + self.dropout(h @ down, rngs=key), (BATCH, SEQ, EMBED)), None

        return jax.lax.scan(block, x, (blocks.up[...], blocks.down[...], keys))[0]

    def last(self, x: jax.Array) -> jax.Array:
        head = self.embedding[...].T if self.head is None else self.head[...]
        return with_logical_constraint(x @ head, (BATCH, SEQ, VOCAB))
