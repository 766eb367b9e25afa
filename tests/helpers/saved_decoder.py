"""Checkpoints of runs that were never trained, with random parameters and the options of their model."""

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.errors.options import list_plain_options
from shardtrain.functional.nnx_model import convert_model


def save(folder, config, steps=(1,), **options):
    """Write a checkpoint of each step, each with parameters of its own.

    Returns the last parameters, and those that stand as their average in the state of the optimizer.
    """
    shapes, _ = jax.eval_shape(convert_model(config).init, jax.random.key(0))
    model = {f"model.{name}": value for name, value in list_plain_options(config).items()}
    extra = {"run": {**model, "strategy.layout.mesh.data": 2, **options}}
    rng = np.random.default_rng(0)

    def draw():
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), shapes)

    with Checkpoints(folder / "checkpoints", CheckpointPolicy(keep=9)) as checkpoints:
        for step in steps:
            params, average = draw(), draw()
            state = {"step": jnp.int32(step), "params": params, "opt_state": {"0": {"ema": average}}}
            checkpoints.save(step, state, extra)
    return params, average
