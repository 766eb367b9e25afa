"""The gradients of a batch: per replica, and their sum.

Each index of the replica axes computes a gradient of its own: a leading dim, sharded over these
axes, made by vmap. So the scan over microbatches adds up what one device holds, without any
collective over them, and what joins the replicas happens once a step. Next: `step.py`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.loss import Batch, Loss, checked
from shardtrain.functional.model import BLOCKS, Model
from shardtrain.functional.rng import row_key, step_key
from shardtrain.pipeline.mesh_pipeline import pipeline_sums
from shardtrain.pipeline.schedule import forward_only, make_table
from shardtrain.pipeline.sums import Sums
from shardtrain.pipeline.table import Table
from shardtrain.sharding.rules import Rules
from shardtrain.sharding.specs import with_leading_dim
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State


class Gradients(NamedTuple):
    """The gradients of one batch, and what was computed on the way.

    Args:
      loss_sum: float32 scalar.
      count: float32 scalar, examples or tokens.
      grads: like params, float32; of loss_sum / count.
      model_state: the model's state after the batch.
      metrics: name -> (sum, count), of the loss's own metrics.
    """

    loss_sum: jax.Array
    count: jax.Array
    grads: Any
    model_state: Any
    metrics: dict[str, tuple[jax.Array, jax.Array]]


def constrained(tree: Any, specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda x, spec: with_sharding_constraint(x, NamedSharding(mesh, spec)), tree, specs)


class ReplicaSums(NamedTuple):
    """What each replica computed of its share of a batch; every array begins with a dim of replicas, R.

    Args:
      loss_sum: float32 (R,).
      count: float32 (R,).
      metrics: name -> (sums, counts).
      grads: like params, float32, of loss_sum.
      model_state: the model's state after the batch.
    """

    loss_sum: jax.Array
    count: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    grads: Any
    model_state: Any


_Compute = Callable[..., ReplicaSums]
"""(params, model_state, key, first rows (M, R), batch (M, R, rows, ...)) -> sums."""


def _make_replica_sums(
    model: Model, loss: Loss, placement: Placement, start_row: int
) -> Callable[..., ReplicaSums]:
    """(params, model_state, key, batch, drift) -> `ReplicaSums`, without any collective over replicas."""
    mesh, layout, specs = placement.mesh, placement.layout, placement.specs
    replica_axes = layout.replica_axes
    num_replicas = math.prod(mesh.shape[axis] for axis in replica_axes)
    rules = layout.rules_of_replica()
    row_axes = rules[axes.BATCH]
    own_params = placement.combine.local_steps > 1

    replica_specs = with_leading_dim(specs.params, replica_axes)
    own_specs = with_leading_dim(specs.params, axes.DATA)
    make = _make_scan if placement.stages is None else _make_pipeline
    compute = make(model, loss, placement, rules, replica_specs)

    def sums(params: Any, model_state: Any, key: jax.Array, batch: Batch, drift: Any) -> ReplicaSums:
        if own_params:
            params = constrained(jax.tree.map(jnp.add, params, drift), own_specs, mesh)
            params = jax.tree.map(lambda x: jnp.repeat(x, num_replicas // len(x), 0), params)
            params = constrained(params, replica_specs, mesh)
        num_microbatches, num_rows = jax.tree.leaves(batch)[0].shape[:2]
        batch = jax.tree.map(lambda x: x.reshape(x.shape[0], num_replicas, -1, *x.shape[2:]), batch)
        share = PartitionSpec(None, replica_axes, row_axes)
        batch = constrained(batch, jax.tree.map(lambda _: share, batch), mesh)
        shares = jnp.arange(num_microbatches * num_replicas, dtype=jnp.uint32)
        first_rows = start_row + shares * (num_rows // num_replicas)
        first_rows = first_rows.reshape(num_microbatches, num_replicas)
        model_state = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_replicas, *x.shape)), model_state)
        return compute(params, model_state, key, first_rows, batch)

    return sums


def _make_scan(model: Model, loss: Loss, placement: Placement, rules: Rules, specs: Any) -> _Compute:
    """Microbatches one after the other, each through the whole model."""
    mesh, replica_axes = placement.mesh, placement.layout.replica_axes

    def loss_of_replica(
        params: Any, model_state: Any, key: jax.Array, first_row: jax.Array, batch: Batch
    ) -> tuple[jax.Array, Any]:
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        bound = Bound(model, params, model_state, row_key(key, first_row, num_rows))
        loss_sum, count, metrics = checked(loss(bound, batch))
        # a share that is all padding leaves no trace
        model_state = jax.tree.map(lambda n, o: jnp.where(count > 0, n, o), bound.model_state, model_state)
        return loss_sum, (count, metrics, model_state)

    grad = jax.vmap(
        jax.value_and_grad(loss_of_replica, has_aux=True),
        in_axes=(0 if placement.combine.local_steps > 1 else None, 0, None, 0, 0),
        axis_name=model.axis_name,
        spmd_axis_name=replica_axes or None,
    )

    def compute(
        params: Any, model_state: Any, key: jax.Array, first_rows: jax.Array, batch: Batch
    ) -> ReplicaSums:
        def microbatch(carry: Any, inputs: Any) -> tuple[Any, None]:
            model_state, sums = carry
            (loss_sum, (count, metrics, model_state)), grads = grad(params, model_state, key, *inputs)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            grads = constrained(grads, specs, mesh)
            return (model_state, jax.tree.map(jnp.add, sums, (loss_sum, count, metrics, grads))), None

        inputs = (first_rows, batch)
        with activation_rules(rules, mesh, placement.layout.unnamed):
            first = jax.tree.map(lambda x: x[0], inputs)
            (loss_sum, (count, metrics, _)), grads = jax.eval_shape(grad, params, model_state, key, *first)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (loss_sum, count, metrics, grads))
            zeros = (*zeros[:3], constrained(zeros[3], specs, mesh))
            (model_state, found), _ = jax.lax.scan(microbatch, (model_state, zeros), inputs)
        loss_sum, count, metrics, grads = found
        return ReplicaSums(loss_sum, count, metrics, grads, model_state)

    return compute


def _make_pipeline(model: Model, loss: Loss, placement: Placement, rules: Rules, specs: Any) -> _Compute:
    """Microbatches under way in all stages at once, see `pipeline.runner`."""
    stages, replica_axes = placement.stages, placement.layout.replica_axes
    assert stages is not None

    def compute(
        params: Any, model_state: Any, key: jax.Array, first_rows: jax.Array, batch: Batch
    ) -> ReplicaSums:
        num_microbatches, _, num_rows = jax.tree.leaves(batch)[0].shape[:3]
        table = make_table(
            placement.schedule, stages.num_stages, num_microbatches, stages.num_chunks, lockstep=True
        )
        walk = _walk(model, loss, placement, table, rules)

        def replica(params: Any, key: jax.Array, first_rows: jax.Array, batch: Batch) -> Sums:
            return walk(params, lambda number: row_key(key, first_rows[number], num_rows), batch)

        def run(*arguments: Any) -> Sums:
            with activation_rules(rules, jax.sharding.get_abstract_mesh(), placement.layout.unnamed):
                in_axes = (None, None, 1, 1)
                return jax.vmap(
                    replica, in_axes, axis_name=model.axis_name, spmd_axis_name=replica_axes or None
                )(*arguments)

        found = _in_stages(run, placement.mesh, params, grads_dim=1)(params, key, first_rows, batch)
        grads = constrained(found.grads, specs, placement.mesh)
        return ReplicaSums(found.loss_sum, found.count, found.metrics, grads, model_state)

    return compute


def make_pipeline_losses(model: Model, loss: Loss, placement: Placement) -> Callable[[Any, Batch], Sums]:
    """(params, batch) -> the losses of a batch through a pipeline, without training; for use inside jit."""
    stages, rules = placement.stages, placement.layout.activation_rules
    assert stages is not None

    def losses(params: Any, batch: Batch) -> Sums:
        num_microbatches = jax.tree.leaves(batch)[0].shape[0]
        table = forward_only(
            stages.num_stages,
            num_microbatches,
            stages.num_chunks,
            lockstep=True,
            placement=stages.placement,
        )
        walk = _walk(model, loss, placement, table, rules)

        def run(params: Any, batch: Batch) -> Sums:
            with activation_rules(rules, jax.sharding.get_abstract_mesh(), placement.layout.unnamed):
                return walk(params, lambda number: jax.random.key(0), batch)

        return _in_stages(run, placement.mesh, params, grads_dim=None)(params, batch)

    return losses


def _walk(model: Model, loss: Loss, placement: Placement, table: Table, rules: Rules) -> Callable[..., Sums]:
    """(params, rng, batch) -> sums, on every stage."""
    assert model.chain is not None
    assert placement.stages is not None
    return partial(
        pipeline_sums,
        chain=model.chain,
        loss=loss,
        stages=placement.stages,
        table=table,
        specs=placement.specs.params,
        row_axes=rules[axes.BATCH],
    )


def _in_stages(
    run: Callable[..., Sums], mesh: Mesh, params: Any, grads_dim: int | None
) -> Callable[..., Sums]:
    """A function of (params, ...) on every stage of a pipeline, each with its own blocks.

    Args:
      run: called in a shard_map that is manual over the axis pipeline.
      mesh: the mesh.
      params: for their structure.
      grads_dim: which dim of the gradients of blocks counts blocks; None where there are none.
    """
    whole = PartitionSpec()

    def specs(dim: int) -> Any:
        blocks = PartitionSpec(*[None] * dim, axes.PIPELINE)
        return {name: blocks if name == BLOCKS else whole for name in params}

    grads: Any = {} if grads_dim is None else specs(grads_dim)
    return lambda *arguments: jax.shard_map(
        run,
        mesh=mesh,
        axis_names={axes.PIPELINE},
        in_specs=(specs(0), *[whole] * (len(arguments) - 1)),
        out_specs=Sums(whole, whole, whole, grads),  # type: ignore[arg-type]
        check_vma=False,
    )(*arguments)


def make_gradients(
    model: Model, loss: Loss, placement: Placement, start_row: int = 0
) -> Callable[[Any, Any, jax.Array, Batch], Gradients]:
    """The gradient of the mean loss of a batch, for use inside jit.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      placement: where everything lies.
      start_row: the number of the batch's first row, where it is a part of a larger batch.

    Returns:
      (params, model_state, key, batch) -> `Gradients`; every array of the batch has shape
      (microbatches, rows, ...). Gradients are sharded as `Specs.sharded` says.
    """
    mesh, specs, replica_axes = placement.mesh, placement.specs, placement.layout.replica_axes
    replica_sums = _make_replica_sums(model, loss, placement, start_row)

    def gradients(params: Any, model_state: Any, key: jax.Array, batch: Batch) -> Gradients:
        sums = replica_sums(params, model_state, key, batch, ())
        loss_sum, count, metrics, model_state = _totals(sums)
        grads = jax.tree.map(
            lambda g, spec: sum_replicas(g, spec, replica_axes, mesh), sums.grads, specs.sharded
        )
        grads = jax.tree.map(lambda g: g / jnp.where(count > 0, count, 1), grads)
        return Gradients(loss_sum, count, grads, model_state, metrics)

    return gradients


def _totals(sums: ReplicaSums) -> tuple[jax.Array, jax.Array, Any, Any]:
    """(loss_sum, count, metrics, model_state) of all replicas."""
    loss_sum, count, metrics = jax.tree.map(lambda x: x.sum(0), (sums.loss_sum, sums.count, sums.metrics))
    shares = jnp.where(count > 0, sums.count / count, 1 / len(sums.count))
    return loss_sum, count, metrics, jax.tree.map(lambda x: merge_replicas(x, shares), sums.model_state)


def sum_replicas(
    grads: jax.Array, spec: PartitionSpec, replica_axes: tuple[str, ...], mesh: Mesh, num_kept: int = 0
) -> jax.Array:
    """The sum over the leading dim, the fastest axis first, so that the slower ones reduce shards only.

    Args:
      grads: (replicas, ...).
      spec: of the result, without the leading dim.
      replica_axes: what the leading dim is sharded over.
      mesh: the mesh.
      num_kept: so many axes, the slowest, are not summed over; 0 leaves no leading dim.
    """
    for i in reversed(range(num_kept, len(replica_axes))):
        grads = grads.reshape(-1, mesh.shape[replica_axes[i]], *grads.shape[1:]).sum(1)
        grads = with_sharding_constraint(grads, NamedSharding(mesh, PartitionSpec(replica_axes[:i], *spec)))
    return grads if num_kept else grads[0]


class Bound:
    """A model bound to its parameters and rng: what a loss calls. Keeps the state the call leaves."""

    def __init__(
        self, model: Model, params: Any, model_state: Any, rng: jax.Array, train: bool = True
    ) -> None:
        self.model, self.params, self.rng, self.train = model, params, rng, train
        self.model_state = model_state

    def __call__(self, *inputs: Any) -> Any:
        outputs, self.model_state = self.model.apply(
            self.params, self.model_state, self.rng, self.train, *inputs
        )
        return outputs


def merge_replicas(x: jax.Array, shares: jax.Array) -> jax.Array:
    """A model state that each replica changed for itself: the mean by count, or any one of integers."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    return jnp.tensordot(shares.astype(x.dtype), x, 1)


def make_replica_means(
    model: Model, loss: Loss, placement: Placement, start_row: int
) -> Callable[[State, Batch], tuple[Gradients, Any, jax.Array, jax.Array]]:
    """(state, batch) -> (`Gradients` without grads; of each replica the mean gradient, count, mean loss)."""
    mesh, specs, replica_axes = placement.mesh, placement.specs, placement.layout.replica_axes
    replica_sums = _make_replica_sums(model, loss, placement, start_row)
    num_replicas = mesh.shape[axes.DATA]

    def replica_means(state: State, batch: Batch) -> tuple[Gradients, Any, jax.Array, jax.Array]:
        drift = state.local.drift if placement.combine.local_steps > 1 else ()
        key = step_key(state.seed, state.step)
        sums = replica_sums(state.params, state.model_state, key, batch, drift)
        loss_sum, count, metrics, model_state = _totals(sums)
        counts, losses = (x.reshape(num_replicas, -1).sum(1) for x in (sums.count, sums.loss_sum))

        def mean(grads: jax.Array, spec: PartitionSpec) -> jax.Array:
            grads = sum_replicas(grads, spec, replica_axes, mesh, num_kept=1)
            return grads / beside(jnp.where(counts > 0, counts, 1), grads)

        means = jax.tree.map(mean, sums.grads, specs.sharded)
        losses = losses / jnp.where(counts > 0, counts, 1)
        return Gradients(loss_sum, count, None, model_state, metrics), means, counts, losses

    return replica_means


def beside(counts: jax.Array, x: jax.Array) -> jax.Array:
    """(R,) -> (R, 1, ...), to stand beside an array (R, ...)."""
    return counts.reshape(-1, *[1] * (x.ndim - 1))
