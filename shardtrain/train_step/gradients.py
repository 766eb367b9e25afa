"""Reduce the replicas' sums to the gradient of a batch, or to each replica's mean gradient for a combiner.

`replica_sums.py` computes each replica's sums; they are reduced once a step. Next: `step.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import step_key
from shardtrain.functional.sums import Sums
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_sums import make_replica_sums
from shardtrain.train_step.state import State, get_scale


def make_gradients(
    model: Model, loss: Loss, placement: Placement, *, mean: bool = True
) -> Callable[..., Sums]:
    """Make a function that computes the gradient of the mean loss of a batch, for use inside jit.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      placement: the sharding of every array.
      mean: whether to return the gradient of the mean loss; otherwise of its sum.

    Returns:
      (params, model_state, key, batch, first_row, scale) -> `Sums` of all replicas; every array of the batch
      has shape (microbatches, rows, ...). Gradients are sharded like `Specs.sharded`. `first_row`, a uint32
      scalar, is the index of the batch's first row if it is a part of a larger batch; `scale` is the scale of
      the loss, see `state.LossScale`.
    """
    mesh, specs, replica_axes = placement.mesh, placement.specs, placement.layout.replica_axes
    replica_sums = make_replica_sums(model, loss, placement)

    def gradients(
        params: Any,
        model_state: Any,
        key: jax.Array,
        batch: Batch,
        first_row: jax.Array | int = 0,
        scale: jax.Array | int = 1,
    ) -> Sums:
        sums = replica_sums(params, model_state, key, batch, (), first_row, scale)
        total = _drop_grads(sums)
        grads = jax.tree.map(
            lambda g, spec: sum_replicas(g, spec, replica_axes, mesh), sums.grads, specs.sharded
        )
        total = total._replace(grads=grads)
        return total.of_mean_loss if mean else total

    return gradients


ReplicaMeans = Callable[[State, Batch], tuple[Sums, Any, jax.Array, jax.Array]]
"""See `make_replica_means`."""


def make_replica_means(model: Model, loss: Loss, placement: Placement, start_row: int) -> ReplicaMeans:
    """Make a function that computes the mean gradient of each index of the axis data, for a combiner.

    Args:
      model, loss, placement, start_row: see `make_gradients`.

    Returns:
      (state, batch) -> (`Sums` of all replicas without grads; mean gradients, like params with a leading dim
      over `data`; counts and mean losses, float32 (data,)).
    """
    mesh, specs, replica_axes = placement.mesh, placement.specs, placement.layout.replica_axes
    replica_sums = make_replica_sums(model, loss, placement)
    num_replicas = mesh.shape[axes.DATA]

    def replica_means(state: State, batch: Batch) -> tuple[Sums, Any, jax.Array, jax.Array]:
        drift = state.local.drift if placement.synchronisation.keeps_drift else ()
        key = step_key(state.seed, state.step)
        scale = get_scale(state.loss_scale)
        sums = replica_sums(state.params, state.model_state, key, batch, drift, start_row, scale)
        # `data` is the slowest replica axis: sum over the others, such as fsdp at ZeRO-1
        counts, losses = (x.reshape(num_replicas, -1).sum(1) for x in (sums.count, sums.loss_sum))
        divisors = jnp.where(counts > 0, counts, 1)

        def mean(grads: jax.Array, spec: PartitionSpec) -> jax.Array:
            grads = sum_replicas(grads, spec, replica_axes, mesh, num_kept=1)
            return grads / expand_dims_like(divisors, grads)

        means = jax.tree.map(mean, sums.grads, specs.sharded)
        return _drop_grads(sums), means, counts, losses / divisors

    return replica_means


def _drop_grads(sums: Sums) -> Sums:
    """Sum over replicas without gradients, and average model states by count."""
    total = jax.tree.map(lambda x: x.sum(0), sums._replace(grads={}, model_state=()))
    weights = jnp.where(total.count > 0, sums.count / total.count, 1 / len(sums.count))
    return total._replace(model_state=jax.tree.map(lambda x: merge_replicas(x, weights), sums.model_state))


def sum_replicas(
    grads: jax.Array, spec: PartitionSpec, replica_axes: tuple[str, ...], mesh: Mesh, num_kept: int = 0
) -> jax.Array:
    """Sum over the leading dim, the fastest axis first, so that slower axes reduce only shards.

    Args:
      grads: (replicas, ...).
      spec: the PartitionSpec of the result, without the leading dim.
      replica_axes: the axes over which the leading dim is sharded.
      mesh: the mesh.
      num_kept: number of slowest axes that are not summed over; 0 leaves no leading dim.
    """
    for i in reversed(range(num_kept, len(replica_axes))):
        grads = grads.reshape(-1, mesh.shape[replica_axes[i]], *grads.shape[1:]).sum(1)
        # sharded as the result at once: the next, slower axis reduces only shards
        grads = with_sharding_constraint(grads, NamedSharding(mesh, PartitionSpec(replica_axes[:i], *spec)))
    return grads if num_kept else grads[0]


def merge_replicas(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Average an array of the model state over replicas; take integers from replica 0.

    Args:
      x: (R, ...), one array for each replica.
      weights: float32 (R,), the replicas' fractions of all examples.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    return jnp.tensordot(weights.astype(x.dtype), x, 1)


def expand_dims_like(counts: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape (R,) to (R, 1, ...), so that it broadcasts against x (R, ...)."""
    return counts.reshape(-1, *[1] * (x.ndim - 1))
