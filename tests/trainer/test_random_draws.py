"""A run whose model draws with other dims than rows first: the losses of one device, or a refusal."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quiet_training import InMemory, train_quietly

from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy


class Tokens(nnx.Module):
    def __init__(self, rngs, merged: bool = True):
        self.dense, self.merged = nnx.Linear(4, 4, rngs=rngs), merged
        self.drop, self.streams = nnx.Dropout(0.5, rngs=rngs), rngs.dropout.fork()

    def __call__(self, x):
        y = self.dense(x)
        if not self.merged:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(self.streams(), jnp.arange(len(y)))
            return y + jax.vmap(lambda key: jax.random.normal(key, y.shape[1:]))(keys)
        return self.drop(y.reshape(-1, 4)).reshape(x.shape)


def loss(apply, batch):
    errors = ((apply(batch["x"]) - batch["x"]) ** 2).mean((1, 2))
    return (errors * batch["weights"]).sum(), batch["weights"].sum()


EQUAL = InMemory([{"x": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)}] * 120)
"""Masks alone make rows differ."""

RUN = Run(model=Tokens, data=EQUAL, loss=loss, batch=12, steps=3, log_every=1)

ONE = Layout(mesh={"tensor": 8}, unnamed="replicate")
"""Rows are not split."""


def losses(folder, **strategy):
    run = replace(RUN, run_dir=folder, strategy=Strategy(**strategy))
    return [line["train/loss"] for line in train_quietly(run)[2]]


def test_merged_tokens_have_the_masks_of_one_device(tmp_path):
    one = losses(tmp_path / "one", layout=ONE)
    halves = losses(tmp_path / "halves", layout=ONE, accumulate=2)
    mesh = losses(
        tmp_path / "mesh",
        layout=Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}, unnamed="replicate"),
        accumulate=3,
    )
    np.testing.assert_allclose([halves, mesh], [one, one], rtol=1e-5, atol=1e-6)


def test_what_depends_on_the_split_is_refused_if_rows_are_split(tmp_path):
    run = replace(RUN, model=lambda rngs: Tokens(rngs, False), steps=1, run_dir=tmp_path)
    split = Strategy(layout=ONE, accumulate=2)
    with pytest.raises(ValueError) as error:
        train_quietly(replace(run, strategy=split))
    text = "losses would differ from one device, because random numbers would depend on how rows are split"
    assert str(error.value).startswith(f"{text}:\n  - {__file__}:")
    assert jnp.isfinite(train_quietly(replace(run, strategy=Strategy(layout=ONE)))[2][0]["train/loss"])
