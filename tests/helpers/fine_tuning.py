"""Runs that train some of their parameters, and the same by a plain loop."""

import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
import optax

from shardtrain.data import Batches
from shardtrain.functional.frozen import drop_paths, merge_trees
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.model import path_text
from shardtrain.optim.optimizer import Optimizer, make_optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.trainer.config import Run, make_model

CONSTANT = Schedule(name="constant", peak=0.1)


class Numbers:
    """16 samples of 9 tokens."""

    fingerprint = "numbers"

    def train(self, folder: Path) -> "Numbers":
        return self

    def heldout(self, folder: Path) -> None:
        return None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": np.arange(index, index + 9, dtype=np.int32)}


def run_of(model, folder=None, **options):
    options = {"optimizer": Optimizer(learning_rate=CONSTANT), "batch": 8, "steps": 3, **options}
    return Run(model=model, data=Numbers(), run_dir=folder, **options)


def initial(run):
    return jax.device_get(jax.jit(make_model(run).init)(jax.random.key(run.seed))[0])


def by_hand(run):
    """The parameters after a plain loop that differentiates by the trained parameters alone."""
    model = make_model(dataclasses.replace(run, freeze=()))
    names = make_model(run).frozen
    params, _ = jax.jit(model.init)(jax.random.key(run.seed))
    trained, key = drop_paths(params, names), jax.random.key(0)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, drop_paths(model.dims, names))
    state = optimizer.init(trained)
    batches = Batches(source=run.data, batch=run.batch, seed=run.seed).iterate()

    @jax.jit
    def step(trained, state, batch):
        def loss(trained):
            used = merge_trees(trained, params)
            total, count = next_token_loss(lambda *x: model.apply(used, {}, key, True, *x)[0], batch)
            return total / count

        updates, state = optimizer.update(jax.grad(loss)(trained), state, trained)
        return optax.apply_updates(trained, updates), state

    for batch, _ in itertools.islice(batches, run.steps):
        trained, state = step(trained, state, batch)
    return jax.device_get(merge_trees(trained, params))


def paths(tree):
    return [path_text(path) for path, _ in jax.tree.leaves_with_path(tree)]


def close(found, wanted):
    assert paths(found) == paths(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
