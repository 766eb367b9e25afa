"""A stack of layers whose parameters lack the name of the layers: a run says that names have moved."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from quiet_training import InMemory, train_quietly

from shardtrain.checks.shifted_names import warn_shifted_names
from shardtrain.functional.model import name_arrays
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy

LAYERS = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}


class Block(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        bias = nnx.with_partitioning(nnx.initializers.zeros, ("mlp",))
        self.up = nnx.Linear(8, 16, kernel_init=kernel, bias_init=bias, rngs=rngs)


class Stack(nnx.Module):
    def __init__(self, rngs, **metadata):
        make = nnx.vmap(Block, in_axes=(0,), out_axes=0, **metadata)
        self.blocks = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        return x * self.blocks.up.kernel[...].sum()


def loss(apply, batch):
    return (apply(batch["x"]).mean(1) ** 2 * batch["weights"]).sum(), batch["weights"].sum()


def found(**metadata):
    model = from_nnx(lambda rngs: Stack(rngs, **metadata))
    return warn_shifted_names(name_arrays(model, jax.eval_shape(model.init, jax.random.key(0))[0]))


def test_a_stack_without_the_name_of_its_layers():
    text = found()
    assert text is not None
    assert text.startswith(
        "WARNING: names of dims seem to have moved by one dim in blocks/up/bias, blocks/up/kernel: mlp has"
    )
    assert found(**LAYERS) is None


@pytest.mark.parametrize("last", ["mlp", None])
def test_two_sizes_that_moving_would_not_cure_are_fine(last):
    """The widths of a pyramid, say."""
    arrays = {str(i): NamedArray(dims=("embed", last), shape=(8 * i, 5 * i)) for i in (1, 2, 4)}
    assert warn_shifted_names(arrays) is None


def test_a_run_says_so(tmp_path, one_device):
    layout, data = Strategy(layout=Layout(unnamed="replicate")), InMemory([{"x": np.ones(8, np.float32)}] * 8)
    run = Run(model=Stack, data=data, loss=loss, batch=8, steps=1, run_dir=tmp_path, strategy=layout)
    _, printed, _ = train_quietly(replace(run, model=lambda rngs: Stack(rngs)))
    assert "WARNING: names of dims seem to have moved" in printed
