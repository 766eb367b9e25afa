"""A model that defines its blocks, so that a pipeline inside a mesh can cut it. It knows no pipeline.

shardtrain train examples/own_blocks.py --cpu-devices 4 --mesh pipeline=2,data=2 --accumulate 4
"""

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain import Run, Text
from shardtrain.models.layers import peek_keys

EMBED, MLP, NUM_BLOCKS = 32, 64, 5


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], dims: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(0.2 * jax.random.normal(rngs.params(), shape), out_sharding=dims)


class Block(nnx.Module):
    """Adds to each byte what it makes of the mean of those before it."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = weight(rngs, (EMBED, MLP), ("embed", "mlp"))
        self.down = weight(rngs, (MLP, EMBED), ("mlp", "embed"))
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        means_BTD = jnp.cumsum(x_BTD, 1) / jnp.arange(1, x_BTD.shape[1] + 1)[:, None]
        h_BTF = nnx.gelu((x_BTD + means_BTD) @ self.up[...])
        return x_BTD + self.dropout(h_BTF @ self.down[...], rngs=key)


class Tower(nnx.Module):
    """`first`, `run` over `blocks`, and `last`; a call is their composition."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = weight(rngs, (256, EMBED), ("vocab", "embed"))
        # parameters stacked along a first dim `layers`
        stacked = nnx.vmap(Block, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.blocks = nnx.split_rngs(splits=NUM_BLOCKS)(stacked)(nnx.Rngs(params=rngs.params()))
        self.dropout = nnx.Dropout(0.1)
        self.rngs = rngs["dropout"].fork()

    def first(self, tokens_BT: jax.Array) -> jax.Array:
        return self.table[...][tokens_BT]

    def block_keys(self) -> jax.Array | None:
        return None if self.dropout.deterministic else peek_keys(self.rngs, NUM_BLOCKS)

    def run(self, blocks: Block, x_BTD: jax.Array, keys: jax.Array | None) -> jax.Array:
        def through(x_BTD, block_and_key):
            block, key = block_and_key
            return block(x_BTD, key), None

        return jax.lax.scan(through, x_BTD, (blocks, keys))[0]

    def last(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD @ self.table[...].T

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.last(self.run(self.blocks, self.first(tokens_BT), self.block_keys()))


def run() -> Run:
    return Run(model=Tower, data=Text(seq=32), batch=16, steps=100)
