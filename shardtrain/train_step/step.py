"""The training step of one mesh as a compiled program: gradients, combination of replicas, update.

Usually the gradients of replicas are summed. Another combiner receives each replica's gradient, or its delta:
the parameter changes that the replica's own optimizer computed. Next: `update.py`; `sync/island_step.py`,
several islands.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.combine.replicas import list_combined_entries
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import evaluation_key, new_key, row_key, step_key
from shardtrain.functional.sums import Sums
from shardtrain.jaxpr.operators import OperatorPass, run_operators, shard_operators
from shardtrain.pipeline.schedule import forward_only
from shardtrain.sharding.layout import Layout
from shardtrain.system.xla_flags import mesh_options
from shardtrain.train_step.delta_step import combine_round, make_delta_update, make_merge
from shardtrain.train_step.drift import make_round_merges
from shardtrain.train_step.gradients import ReplicaMeans, make_gradients, make_replica_means
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.replica_sums import BoundModel, map_replicas, run_over_stages, split_by_replica
from shardtrain.train_step.state import Metrics, State, get_scale, offload_optimizer
from shardtrain.train_step.update import (
    Update,
    apply_gradients,
    compute_gradient_metrics,
    keep_unless_skipped,
)

Step = Callable[[State, Batch], tuple[State, Metrics]]


def make_step(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    learning_rate: optax.Schedule | None = None,
    start_row: int = 0,
    last_step: int = -1,
) -> Step:
    """Make the training step as one compiled program.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: the shardings of this model's and optimizer's state, and how replicas are combined.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
      start_row: the index of the batch's first row if it is a part of a larger batch.
      last_step: the last step of the run, in which replicas with local steps combine all their changes; -1 if
        there is none.

    Returns:
      (state, batch) -> (state, metrics). The state passed in is donated: use the new one. Every array of
      the batch has shape (microbatches, rows, ...), see `data.place`. Metrics are float32 scalars on the
      device: loss_sum, count, grad_norm (before clipping; with deltas the root mean square of the
      replicas' norms), skipped (1 if loss or gradient is not finite: then only the step counter
      changes, and earlier changes of replicas are combined if they are due), metrics of the loss as
      (sum, count), and metrics of the combiner, (L,) by `list_combined_labels`.
    """
    if placement.synchronisation.is_mean:
        compute = _make_mean_update(model, loss, optimizer, placement, start_row)
    else:
        # any other combiner receives the mean gradient of each replica
        replica_means = make_replica_means(model, loss, placement, start_row)
        make = make_delta_update if placement.synchronisation.on_deltas else _make_combined_update
        compute = make(replica_means, optimizer, placement)
    # earlier changes of replicas are combined also if this step is skipped
    merge = make_merge(placement, last_step) if placement.synchronisation.keeps_drift else None

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        update, metrics = compute(state, batch)
        state, metrics = keep_unless_skipped(update, placement, state, metrics, learning_rate)
        if merge is None:
            return state, metrics
        state, found = merge(state)
        return state, {**metrics, **found}

    return compile_step(step, placement)


def compile_step(step: Step, placement: Placement) -> Step:
    """Compile a step: state and batch have the shardings of the placement, and the state is donated."""
    whole = NamedSharding(placement.mesh, PartitionSpec())
    return jax.jit(
        offload_optimizer(step, placement.state),
        in_shardings=(placement.state, placement.batch),
        out_shardings=(placement.state, whole),
        donate_argnums=0,
        compiler_options=placement.compiler_options,
    )


def _make_mean_update(
    model: Model, loss: Loss, optimizer: optax.GradientTransformation, placement: Placement, start_row: int
) -> Callable[[State, Batch], tuple[Update, Metrics]]:
    """Make the computation of a step that sums the gradients of replicas, and needs none of them alone."""
    gradients = make_gradients(model, loss, placement)

    def summed(state: State, batch: Batch) -> tuple[Update, Metrics]:
        key = step_key(state.seed, state.step)

        def compute(params: Any) -> Sums:
            scale = get_scale(state.loss_scale)
            return gradients(params, state.model_state, key, batch, start_row, scale)

        found = compute(state.params)
        metrics = compute_gradient_metrics(found)

        def update(state: State) -> State:
            return apply_gradients(optimizer, placement, state, found, metrics["grad_norm"], compute)

        return update, metrics

    return summed


def _make_combined_update(
    replica_means: ReplicaMeans, optimizer: optax.GradientTransformation, placement: Placement
) -> Callable[[State, Batch], tuple[Update, Metrics]]:
    """Make the computation of a step that combines gradients over replicas and updates once."""
    # all trained parameters are one fragment
    (own,) = make_round_merges(placement.synchronisation, placement.specs)
    _, entries = list_combined_entries(placement.specs)

    def combined(state: State, batch: Batch) -> tuple[Update, Metrics]:
        found, means, counts, _ = replica_means(state, batch)
        values = own.fragment.take(means, lead=1)
        value, combine_state, extra = combine_round(
            own, values, counts, state.combine_state[0], placement, entries
        )
        grads = own.fragment.put(jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), means), value)
        found = found._replace(grads=grads)
        metrics = compute_gradient_metrics(found)

        def update(state: State) -> State:
            new = apply_gradients(optimizer, placement, state, found, metrics["grad_norm"])
            return new._replace(combine_state=(combine_state,))

        return update, {**metrics, **extra}

    return combined


def list_combined_labels(placement: Placement) -> list[str]:
    """Return the names of the entries of a combiner's metric (L,): parameters, or layers of stacked ones."""
    return list_combined_entries(placement.specs)[0]


def make_evaluate(model: Model, loss: Loss, placement: Placement) -> Callable[..., Metrics]:
    """Make the function that computes the loss in evaluation mode: no dropout, running statistics.

    Returns:
      (state, batch, number=0, first_row=0) -> metrics: loss_sum, count and metrics of the loss as (sum,
      count). A model that draws random numbers in evaluation uses the number of the batch and of the row in
      it, so they do not depend on the mesh; `first_row` is the number of the batch's first row if it is a
      part of a larger batch.
    """
    make = _make_mapped_losses if placement.stages is None else _make_pipeline_losses
    losses = make(model, loss, placement)

    def evaluate(state: State, batch: Batch, number: jax.Array, first_row: jax.Array) -> Metrics:
        first_rows, batch = split_by_replica(batch, first_row, placement)
        given = (state.params, state.model_state, evaluation_key(number), first_rows, batch)
        loss_sum, count, metrics = losses(*given)
        return Sums(loss_sum, count, metrics, {}).logged

    whole = NamedSharding(placement.mesh, PartitionSpec())
    compiled = jax.jit(
        evaluate,
        in_shardings=(placement.state, placement.batch, whole, whole),
        out_shardings=whole,
        compiler_options=mesh_options(placement.mesh.devices.flat[0].platform),
    )
    return lambda state, batch, number=0, first_row=0: compiled(
        state, batch, np.uint32(number), np.uint32(first_row)
    )


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
    table, rows = placement.layout.operators, placement.layout.rules_of_replica()[axes.BATCH]
    sharded = shard_operators(replica, table, placement.mesh.shape, rows, batch=4, strict=False)
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


def trace_operators(
    model: Model, loss: Loss, batch: Mapping[str, Any], layout: Layout, mesh: Mesh | AbstractMesh
) -> OperatorPass:
    """Trace the loss of one replica, with the shardings of the layout, without devices.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: a microbatch of all replicas, arrays or shapes.
      layout: the layout.
      mesh: its mesh.

    Returns:
      What it found: `operators`, and by `check` what does not fit them.
    """
    num_replicas = math.prod(mesh.shape[axis] for axis in layout.replica_axes)
    num_rows = next(iter(batch.values())).shape[0] // num_replicas
    rows = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    params, model_state = jax.eval_shape(model.init, new_key(0))
    each = OperatorPass(table=layout.operators, sizes=mesh.shape)

    def compute(params: Any, model_state: Any, rows: Any) -> Any:
        return sum_loss(loss, BoundModel(model, params, model_state, row_key(new_key(0), 0, num_rows)), rows)

    with activation_rules(layout.rules_of_replica(), mesh, *layout.tracing):
        jax.eval_shape(run_operators(compute, each), params, model_state, rows)
    return each
