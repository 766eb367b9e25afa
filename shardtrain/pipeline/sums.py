"""What a pipeline adds up, microbatch by microbatch. Next: `mesh_pipeline.py`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.functional.model import BLOCKS


class Sums(NamedTuple):
    """What a pipeline computed of a batch, the same on every stage but for its own blocks' gradients.

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


def with_loss(sums: Sums, loss_sum: Any, count: Any, metrics: Any) -> Sums:
    """The sums with the loss of a microbatch."""
    total = {"loss_sum": sums.loss_sum, "count": sums.count, "metrics": sums.metrics}
    return sums._replace(**_added(total, {"loss_sum": loss_sum, "count": count, "metrics": metrics}))


def with_grads(sums: Sums, found: dict[str, Any]) -> Sums:
    """The sums with gradients of what stands under some names."""
    more = {name: _added(sums.grads[name], found[name]) for name in found}
    return sums._replace(grads={**sums.grads, **more})


def with_rows(sums: Sums, found: Any, start: Any) -> Sums:
    """The sums with gradients of some of the rows of blocks, from `start` on."""

    def added(total: jax.Array, g: jax.Array) -> jax.Array:
        # added to all rows: that XLA does in place, where it would copy a slice that it reads and writes
        g = g.astype(jnp.float32)
        if g.shape != total.shape:
            g = lax.dynamic_update_slice_in_dim(jnp.zeros_like(total), g, start, 0)
        return total + g

    blocks = jax.tree.map(added, sums.grads[BLOCKS], found)
    return sums._replace(grads={**sums.grads, BLOCKS: blocks})


def _added(total: Any, more: Any) -> Any:
    return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, more)
