"""Parameters that are whole numbers or booleans, frozen: kept to the bit, in any layout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quiet_training import InMemory, train_quietly

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.trained_model import load

LARGE = 2**24 + 1
"""No float32 is this number."""


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.mask = nnx.Linear(4, 4, rngs=rngs), nnx.Param(jnp.arange(4) > 0)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x)) * self.mask[...]


class Gathered(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.table = nnx.Param(jnp.array([3, 1, 0, LARGE]))

    def __call__(self, x):
        x = x[:, jnp.minimum(self.table[...], 3)]
        for block in self.blocks:
            x = block(x)
        return x


ROWS = [{"x": row} for row in np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)]


def loss(apply, batch):
    return ((apply(batch["x"]) - 1) ** 2 @ jnp.ones(4) * batch["weights"]).sum(), batch["weights"].sum()


RUN = Run(
    model=Gathered, data=InMemory(ROWS), loss=loss, batch=8, steps=2, log_every=1, freeze=("table", "*/mask")
)  # fmt: skip
MEAN = Synchronisation(on="deltas", every=2)


def after(folder, mesh, **options):
    layout = Layout(mesh=mesh, unnamed="replicate")
    run = replace(RUN, run_dir=folder, strategy=Strategy(layout=layout, **options))
    found, _, lines = train_quietly(run)
    return jax.device_get(found.state.params), [line["train/loss"] for line in lines]


@pytest.mark.parametrize(
    "strategy",
    [
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "accumulate": 2},
        {"mesh": {"data": 2, "tensor": 4}, "synchronisation": MEAN, "compute_dtype": "bfloat16"},
    ],
    ids=["mesh", "deltas in bfloat16"],
)
def test_they_keep_their_bits_in_any_layout(strategy, tmp_path):
    params, losses = after(tmp_path / "a", **strategy)
    assert params["table"].tolist() == [3, 1, 0, LARGE]
    assert params["table"].dtype == np.int32
    assert params["blocks"]["1"]["mask"].tolist() == [False, True, True, True]
    if "synchronisation" not in strategy:
        np.testing.assert_allclose(losses, after(tmp_path / "b", {"tensor": 8})[1], rtol=1e-5)
    assert load(tmp_path / "a", Gathered).table[3] == LARGE
