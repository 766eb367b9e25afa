"""The programs that islands compare are those of their steps: traced once, and different where a step is."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.islands.rank_facts import program_hash
from shardtrain.islands.transfer import Transfer
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state, restorable_state
from shardtrain.train_step.island_step import make_island_step
from shardtrain.train_step.placement import make_placement

BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 16, (8, 5), np.int32),
    "weights": np.ones(8, np.float32),
}
WAYS: dict[str, dict[str, Any]] = {
    "sums of gradients": {},
    "in two programs": {"num_parts": 2},
    "Adasum": {"synchronisation": Synchronisation(by="adasum")},
    "deltas": {"synchronisation": Synchronisation(on="deltas", every=2)},
}


class Alone:
    """A group of one island, without MPI."""

    size, index, traced_bytes = 1, 0, 0

    def all_reduce(self, x, span=None):
        return x


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.full] * (way in ("in two programs", "Adasum"))) for way in WAYS],
)
def test_what_is_compared_is_traced_once_and_differs_by_loss_and_optimizer(way):
    traced = []

    def program(rate=0.1, factor=1.0, starts=False):
        """The hash of the programs of a step; and what is traced when it starts."""

        def loss(apply, batch):
            traced.append("loss")
            total, *others = next_token_loss(apply, batch)
            return factor * total, *others

        def update(grads, state, params=None):
            traced.append("update")
            return jax.tree.map(lambda g: -rate * g, grads), state

        optimizer = optax.GradientTransformation(lambda params: (), update)  # type: ignore[arg-type]
        model, layout = from_nnx(TinyConfig(vocab=16, num_layers=2)), Layout(mesh={"data": 2})
        mesh = make_mesh(layout, jax.devices()[:2])
        placement = make_placement(model, optimizer, layout, mesh)
        transfer = Transfer(mesh, [Alone()])  # type: ignore[list-item]
        batch = place(BATCH, mesh, layout.batch_axes)
        step: Any = make_island_step(model, loss, optimizer, placement, transfer, batch=batch, **WAYS[way])
        wanted = step.wanted(restorable_state(placement), batch)
        found = program_hash("\n".join(each.as_text() for each in step.lowered(wanted, batch)))
        assert {"loss", "update"} <= set(traced)
        if starts:
            state = step.begin(init_state(model, optimizer, placement, 0), batch)
            traced.clear()
            step(state, batch)
        transfer.close()
        return found

    whole = program(starts=True)
    assert traced == []
    assert program() == whole
    assert len({whole, program(rate=0.2), program(factor=2.0)}) == 3
