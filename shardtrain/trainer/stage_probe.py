"""Measure how fast an island computes a block of the model, for a cut of its pipeline by time.

Next: `stage_cut.py`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.rng import new_key
from shardtrain.pipeline.block_costs import BACKWARD
from shardtrain.pipeline.costs import Traced

LEAST_RUNS, LEAST_SECONDS = 5, 1.0
"""A block runs at least so often, and so long: a core that others use too is fast for a moment."""


def flops_per_second(traced: Traced, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the flops per second of one local device, in the forward and backward of the costliest block.

    It is compiled and run on values of no meaning, for the rows that were traced.

    Args:
      traced: the model's functions.
      clock: seconds.
    """
    costs = traced.costs("flops").blocks
    number = max(range(len(costs)), key=lambda i: costs[i])
    entering = traced.entering
    for before in range(0 if traced.chain.stacked else number):
        entering = jax.eval_shape(partial(traced.run, before), traced.block(before), entering)
    block, activations = jax.tree.map(_values, (traced.block(number), entering))
    leaves, structure = jax.tree.flatten(activations)
    is_float = [_is_float(x) for x in leaves]

    def total(block: Any, floats: list[jax.Array]) -> jax.Array:
        left = iter(floats)
        given = [next(left) if yes else x for x, yes in zip(leaves, is_float, strict=True)]
        found = jax.tree.leaves(traced.run(number, block, jax.tree.unflatten(structure, given)))
        return sum((jnp.square(x.astype(jnp.float32)).sum() for x in found if _is_float(x)), jnp.float32(0))

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))
    floats = [x for x, yes in zip(leaves, is_float, strict=True) if yes]
    jax.block_until_ready(gradients(block, floats))  # compiles
    runs, seconds, start = 0, 0.0, clock()
    while runs < LEAST_RUNS or seconds < LEAST_SECONDS:
        jax.block_until_ready(gradients(block, floats))
        runs, seconds = runs + 1, clock() - start
    return (1 + BACKWARD) * costs[number] * runs / seconds


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _values(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return values that no operation can skip, and that overflow nowhere."""
    if not _is_float(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    return (0.02 * jax.random.normal(new_key(0), shape.shape)).astype(shape.dtype)
