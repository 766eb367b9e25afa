"""The sums of a batch: loss, count, metrics, gradients and model state.

The same type serves a microbatch, a replica, a stage and a whole step. Next: `train_step/replica_sums.py`,
`pipeline/mesh_pipeline.py`, `train_step/stage_programs.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.functional.model import BLOCKS


class GradientSquares(NamedTuple):
    """Squared gradients of microbatches and replicas, for the gradient noise scale.

    Args:
      norms: float32 scalar, the sum of the squared norms of the gradients of summed losses.
      counts: float32 scalar, the sum of the squared counts of their examples or tokens.
    """

    norms: jax.Array
    counts: jax.Array


class Sums(NamedTuple):
    """The results of a batch, summed over its microbatches.

    With several replicas every array begins with a dim of replicas, R.

    Args:
      loss_sum: float32 scalar.
      count: float32 scalar, examples or tokens.
      metrics: name -> (sum, count), the metrics of the loss.
      grads: like params, float32: gradients of loss_sum, or of the mean loss after `of_mean_loss`; {} without
        a backward pass.
      model_state: the model state after the batch; () if it is kept elsewhere.
      squares: squared gradients; () without the gradient noise scale.
    """

    loss_sum: jax.Array
    count: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    grads: Any
    model_state: Any = ()
    squares: GradientSquares | tuple[()] = ()

    @property
    def mean_loss(self) -> jax.Array:
        """The mean loss; 0 if no example counts."""
        return self.loss_sum / jnp.where(self.count > 0, self.count, 1)

    @property
    def of_mean_loss(self) -> "Sums":
        """The sums with gradients of the mean loss in place of the sum; zeros if no example counts."""
        divisor = jnp.where(self.count > 0, self.count, 1)
        return self._replace(grads=jax.tree.map(lambda g: g / divisor, self.grads))

    @property
    def of_loss(self) -> dict[str, Any]:
        """The sums of the loss by name, without gradients and state."""
        return {"loss_sum": self.loss_sum, "count": self.count, "metrics": self.metrics}

    @property
    def logged(self) -> dict[str, Any]:
        """The metrics of a step: those of the loss, and its sum and count."""
        return {**self.metrics, "loss_sum": self.loss_sum, "count": self.count}


def add_loss(sums: Sums, loss_sum: Any, count: Any, metrics: Any) -> Sums:
    """Return the sums with the loss of a microbatch added."""
    return sums._replace(**_add(sums.of_loss, {"loss_sum": loss_sum, "count": count, "metrics": metrics}))


def add_grads(sums: Sums, grads: dict[str, Any]) -> Sums:
    """Return the sums with gradients of some top-level names of params added."""
    more = {name: _add(sums.grads[name], grads[name]) for name in grads}
    return sums._replace(grads={**sums.grads, **more})


def add_block_grads(sums: Sums, grads: Any, start: Any) -> Sums:
    """Return the sums with gradients of stacked blocks, from block `start` on, added."""

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
