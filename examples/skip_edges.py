"""Blocks of different shapes, and a value that skips them: a pipeline across islands sends it past them.

shardtrain launch --islands 2 -- train examples/skip_edges.py --across pipeline --accumulate 4 --stages 1,3
"""

from collections.abc import Sequence

import jax
from flax import nnx

from shardtrain import Run, Text


def weight(rngs: nnx.Rngs, before: int, after: int) -> nnx.Param:
    return nnx.Param(0.2 * jax.random.normal(rngs.params(), (before, after)), out_sharding=("embed", "mlp"))


class Narrow(nnx.Module):
    """Changes `x` and hands on all else as it is."""

    def __init__(self, before: int, after: int, rngs: nnx.Rngs):
        self.weight = weight(rngs, before, after)

    def __call__(self, activations: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {**activations, "x": nnx.gelu(activations["x"] @ self.weight[...])}


class Join(Narrow):
    """The last block: it reads what skipped the others, and drops it."""

    def __call__(self, activations: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"x": activations["x"] @ self.weight[...] + activations["early"]}


class Hourglass(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = weight(rngs, 256, 32)
        widths = [Narrow(32, 16, rngs), Narrow(16, 8, rngs), Narrow(8, 16, rngs), Join(16, 32, rngs)]
        self.blocks = nnx.List(widths)

    def first(self, tokens_BT: jax.Array) -> dict[str, jax.Array]:
        x_BTD = self.table[...][tokens_BT]
        return {"x": x_BTD, "early": x_BTD}

    def run(
        self, blocks: Sequence[Narrow], activations: dict[str, jax.Array], keys: None
    ) -> dict[str, jax.Array]:
        for block in blocks:
            activations = block(activations)
        return activations

    def last(self, activations: dict[str, jax.Array]) -> jax.Array:
        return activations["x"] @ self.table[...].T

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.last(self.run(self.blocks, self.first(tokens_BT), None))


def run() -> Run:
    return Run(model=Hourglass, data=Text(seq=32), batch=16, steps=100)
