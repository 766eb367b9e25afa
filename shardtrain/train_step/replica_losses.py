"""Compute the losses of a batch in evaluation, each replica its own rows as in training.

Otherwise XLA's partitioner computes some models wrongly if rows are sharded over several axes
(docs/decisions/0059).
Next: `step.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import row_key
from shardtrain.functional.sums import Sums
from shardtrain.jaxpr.operators import shard_operators
from shardtrain.pipeline.schedule import forward_only
from shardtrain.train_step.each_replica import map_replicas
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_sums import BoundModel, run_over_stages, split_by_replica


def make_losses(model: Model, loss: Loss, placement: Placement) -> Callable[..., Sums]:
    """Make a function that evaluates a batch, for use inside jit.

    Returns:
      (params, model_state, key, first row, batch) -> the sums of losses, counts and metrics, without
      gradients.
    """
    make = _make_mapped_losses if placement.stages is None else _make_pipeline_losses
    compute = make(model, loss, placement)

    def losses(params: Any, model_state: Any, key: jax.Array, first_row: jax.Array, batch: Batch) -> Sums:
        first_rows, batch = split_by_replica(batch, first_row, placement)
        loss_sum, count, metrics = compute(params, model_state, key, first_rows, batch)
        return Sums(loss_sum, count, metrics, {})

    return losses


def _make_mapped_losses(model: Model, loss: Loss, placement: Placement) -> Callable[..., Any]:
    """Make the function that maps over microbatches, each through the whole model."""

    def replica(params: Any, model_state: Any, key: jax.Array, first_row: jax.Array, batch: Batch) -> Any:
        rng = row_key(key, first_row, jax.tree.leaves(batch)[0].shape[0], model.draws)
        bound = BoundModel(model, params, model_state, rng, train=False)
        found = sum_loss(loss, bound, batch, train=False)
        if "weights" not in batch:
            return found
        # some losses compute a mean over rows, which is NaN without rows
        has_rows = (batch["weights"] != 0).any()
        return jax.tree.map(lambda x: jnp.where(has_rows, x, 0), found)

    # held-out losses may lack an operator
    sharded = shard_operators(replica, placement.layout.operators, placement.mesh.shape, strict=False)
    each = map_replicas(sharded, (None, None, None, 0, 0), placement, model.axis_name)

    def compute(params: Any, model_state: Any, key: jax.Array, first_rows: jax.Array, batch: Batch) -> Any:
        rules = placement.layout.rules_of_replica()
        with activation_rules(rules, placement.mesh, *placement.layout.tracing):
            found = jax.lax.map(lambda given: each(params, model_state, key, *given), (first_rows, batch))
        return jax.tree.map(lambda x: x.sum((0, 1)), found)

    return compute


def _make_pipeline_losses(model: Model, loss: Loss, placement: Placement) -> Callable[..., Any]:
    """Make the function that runs a pipeline forward; such models have no state."""
    stages = placement.stages
    assert stages is not None

    def compute(params: Any, model_state: Any, key: jax.Array, first_rows: jax.Array, batch: Batch) -> Any:
        table = forward_only(
            stages.num_stages, len(first_rows), stages.num_chunks, lockstep=True, placement=stages.placement
        )
        staged = run_over_stages(model, loss, placement, table, has_own=False, has_grads=False)
        found = staged(params, key, first_rows, batch)
        return jax.tree.map(lambda x: x.sum(0), found[:3])

    return compute
