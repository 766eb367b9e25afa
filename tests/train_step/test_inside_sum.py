"""An island sends the mean gradient of its own replicas, or with `inside="sum"` their sum."""

import jax
import numpy as np
import optax
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.islands.transfer import Transfer
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.island_step import make_island_step
from shardtrain.train_step.placement import make_placement

MODEL = from_nnx(TinyConfig(vocab=16, embed=8, mlp=8))
BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 16, (16, 5), np.int32),
    "weights": np.ones(16, np.float32),
}


class Alone:
    """A group of one island, without MPI."""

    size, index, traced_bytes = 1, 0, 0

    def all_reduce(self, x, span=None):
        return x


def change(sizes, inside):
    """What a step of SGD with rate 1 adds to the parameters: the combined gradient, negative."""
    layout, optimizer = Layout(mesh=sizes), optax.sgd(1.0)
    mesh = make_mesh(layout)
    placement = make_placement(MODEL, optimizer, layout, mesh)
    transfer = Transfer(mesh, [Alone()])  # type: ignore[list-item]
    step = make_island_step(
        MODEL, next_token_loss, optimizer, placement, transfer, synchronisation=Synchronisation(inside=inside)
    )
    batch = place(BATCH, mesh, layout.batch_axes)
    state = step.begin(init_state(MODEL, optimizer, placement, 0), batch)
    before = jax.device_get(state.params)
    after = jax.device_get(step(state, batch)[0].params)
    transfer.close()
    return jax.tree.map(lambda a, b: a - b, after, before)


def test_the_sum_is_the_mean_times_the_islands_own_replicas():
    sizes = {"data": 2, "fsdp": 4}
    mean, total = (change(sizes, inside) for inside in ("mean", "sum"))
    assert any(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(mean))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, 8 * a, 1e-4, 1e-6), mean, total)
