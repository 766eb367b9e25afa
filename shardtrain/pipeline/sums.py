"""Sums over the microbatches of a batch: the loss, its metrics, and gradients.

Next: `mesh_pipeline.py`, and `train_step/stage_programs.py` across islands.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.functional.model import BLOCKS


class Sums(NamedTuple):
    """Sums over microbatches. Across islands every array begins with a dim of the island's replicas, R.

    Args:
      loss_sum: float32 scalar.
      count: float32 scalar.
      metrics: name -> (sum, count).
      grads: like params, float32, of loss_sum; {} without a backward pass.
    """

    loss_sum: jax.Array
    count: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    grads: Any


def add_loss(sums: Sums, loss_sum: Any, count: Any, metrics: Any) -> Sums:
    """Return the sums with the loss of a microbatch added."""
    total = {"loss_sum": sums.loss_sum, "count": sums.count, "metrics": sums.metrics}
    return sums._replace(**_add(total, {"loss_sum": loss_sum, "count": count, "metrics": metrics}))


def add_grads(sums: Sums, grads: dict[str, Any]) -> Sums:
    """Return the sums with gradients of some of the top-level names of params added."""
    more = {name: _add(sums.grads[name], grads[name]) for name in grads}
    return sums._replace(grads={**sums.grads, **more})


def add_block_grads(sums: Sums, grads: Any, start: Any) -> Sums:
    """Return the sums with gradients of stacked blocks added, those from block `start` on."""

    def add(total: jax.Array, g: jax.Array) -> jax.Array:
        # added to all blocks: XLA does that in place, where it would copy a slice that it reads and writes
        g = g.astype(jnp.float32)
        if g.shape != total.shape:
            g = lax.dynamic_update_slice_in_dim(jnp.zeros_like(total), g, start, 0)
        return total + g

    blocks = jax.tree.map(add, sums.grads[BLOCKS], grads)
    return sums._replace(grads={**sums.grads, BLOCKS: blocks})


def _add(total: Any, more: Any) -> Any:
    return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, more)
