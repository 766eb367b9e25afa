"""A model of one's own: plain Flax with names on its dims, and a run of it. It knows no mesh.

shardtrain train examples/own_model.py --cpu-devices 8 --mesh fsdp=2,tensor=4
"""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain import Run, Text

SEQ, EMBED, HIDDEN = 64, 64, 256


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], dims: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(0.05 * jax.random.normal(rngs.params(), shape), out_sharding=dims)


class Averages(nnx.Module):
    """Predicts a byte from running averages of those before it, at four speeds of forgetting."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = weight(rngs, (256, EMBED), ("vocab", "embed"))
        self.up = weight(rngs, (5, EMBED, HIDDEN), ("layers", "embed", "mlp"))
        self.down = weight(rngs, (HIDDEN, EMBED), ("mlp", "embed"))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        table_VD = with_logical_constraint(self.table[...], ("vocab", "embed"))
        x_BTD = with_logical_constraint(table_VD[tokens_BT], ("batch", "seq", "embed"))
        means = [x_BTD, *(average(x_BTD, keep) for keep in (0.3, 0.6, 0.8, 0.95))]
        up_LDF = with_logical_constraint(self.up[...], ("layers", "embed", "mlp"))
        h_BTF = jnp.einsum("LBTD,LDF->BTF", jnp.stack(means), up_LDF)
        h_BTF = nnx.gelu(with_logical_constraint(h_BTF, ("batch", "seq", "mlp")))
        down_FD = with_logical_constraint(self.down[...], ("mlp", "embed"))
        y_BTD = x_BTD + self.dropout(with_logical_constraint(h_BTF @ down_FD, ("batch", "seq", "embed")))
        return with_logical_constraint(y_BTD @ table_VD.T, ("batch", "seq", "vocab"))


def average(x_BTD: jax.Array, keep: float) -> jax.Array:
    def forget(mean_BD: jax.Array, x_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean_BD = keep * mean_BD + (1 - keep) * x_BD
        return mean_BD, mean_BD

    return jnp.moveaxis(jax.lax.scan(forget, jnp.zeros_like(x_BTD[:, 0]), jnp.moveaxis(x_BTD, 1, 0))[1], 0, 1)


def run() -> Run:
    return Run(model=Averages, data=Text(seq=SEQ), batch=32, steps=200)
