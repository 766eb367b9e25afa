"""A model that names no dims is sharded over fsdp by the largest dim of each parameter."""

from pathlib import Path

import jax
import numpy as np
from fine_tuning import CONSTANT, by_hand, close, run_of
from flax import nnx

from shardtrain.optim.optimizer import Optimizer
from shardtrain.report.sharding import sharding_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.setup import make_setup
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

MESH = {"fsdp": 8}


class Plain(nnx.Module):
    """Tokens to logits, by a lookup and two linear layers of Flax."""

    def __init__(self, rngs):
        self.table = nnx.Embed(64, 32, rngs=rngs)
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.head = nnx.Linear(128, 64, rngs=rngs)
        self.odd = nnx.Param(np.ones(3, np.float32))

    def __call__(self, tokens):
        return self.head(jax.nn.relu(self.up(self.table(tokens)))) * self.odd.sum()


def make_run(folder: Path, zero: int = 3):
    return run_of(
        lambda rngs: Plain(rngs),
        folder,
        strategy=Strategy(layout=Layout(mesh=MESH, unnamed="shard", zero=zero)),
        optimizer=Optimizer(name="sgd", learning_rate=CONSTANT),
    )


def test_the_state_takes_a_seventh_of_a_device_at_most_and_losses_are_those_of_one_device(tmp_path):
    run = make_run(tmp_path)
    placement = make_setup(run).placement
    state = placement.specs.abstract
    shards = jax.tree.map(
        lambda x, sharding: np.prod(sharding.shard_shape(x.shape), dtype=int),
        state.params,
        placement.state.params,
    )
    whole = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(jax.tree.leaves(shards)) <= whole / 7
    text = sharding_text(placement.specs, axis_sizes(MESH, 8))
    assert "sharded over fsdp along the largest dim that it divides, and XLA shards the activations" in text
    assert placement.specs.params["odd"] == jax.sharding.PartitionSpec(None)
    assert placement.specs.params["up"]["kernel"] == jax.sharding.PartitionSpec(None, "fsdp")
    close(jax.device_get(train(run, None).state.params), by_hand(run))


def test_at_zero_1_parameters_are_whole_and_the_optimizer_is_sharded(tmp_path):
    specs = make_setup(make_run(tmp_path, zero=1)).placement.specs
    assert specs.params["up"]["kernel"] == jax.sharding.PartitionSpec(None, None)
    assert specs.sharded["up"]["kernel"] == jax.sharding.PartitionSpec(None, "fsdp")
