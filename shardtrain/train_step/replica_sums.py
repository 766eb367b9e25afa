"""Compute each replica's sums over its rows of a batch: losses, counts, metrics, gradients.

Each index of the replica axes computes its own gradient: a leading dim, made by vmap and sharded over these
axes. So adding up microbatches needs no collective over replicas. Next: `gradients.py`, which reduces the
replicas.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.float_gradients import value_and_grad
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import BLOCKS, Model
from shardtrain.functional.rng import row_key
from shardtrain.functional.sums import GradientSquares, Sums
from shardtrain.jaxpr.operators import shard_operators
from shardtrain.pipeline.mesh_pipeline import run_pipeline
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.table import Table
from shardtrain.sharding.specs import add_leading_dim
from shardtrain.train_step.drift import add_drift
from shardtrain.train_step.placement import Placement, constrain

_Compute = Callable[..., Sums]
"""(params, model_state, key, first rows (M, R), batch (M, R, rows, ...), scale) -> `Sums` of each replica."""


class BoundModel:
    """A model with its parameters and random key, as the function that a loss calls.

    Args:
      model: the model.
      params: its parameters.
      model_state: its state before the call; the attribute holds the state after the call.
      rng: the key of this call.
      train: whether to train; False means no dropout, and running statistics.
    """

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


def make_replica_sums(model: Model, loss: Loss, placement: Placement) -> Callable[..., Sums]:
    """Make a function that computes the sums of each replica, for use inside jit.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      placement: the sharding of every array.

    Returns:
      (params, model_state, key, batch, drift, first_row, scale) -> `Sums` of each replica, without
      collectives over replicas. `drift` is each replica's difference from params, with a leading dim over
      `data`; it is only read with local steps. `first_row` is the index of the batch's first row if it is a
      part of a larger batch. `scale` is a factor of the loss in the backward pass, by which gradients are
      divided, see `state.LossScale`; a pipeline ignores it.
    """
    mesh, layout, specs = placement.mesh, placement.layout, placement.specs
    replica_axes = layout.replica_axes
    num_replicas = math.prod(mesh.shape[axis] for axis in replica_axes)
    local_params = placement.synchronisation.keeps_drift

    # a leading dim over all replica axes; or only over `data`, for the parameters of local steps
    replica_specs = add_leading_dim(specs.params, replica_axes)
    local_specs = add_leading_dim(specs.params, axes.DATA)
    make = _make_scan if placement.stages is None else _make_pipeline
    compute = make(model, loss, placement, replica_specs)

    def sums(
        params: Any,
        model_state: Any,
        key: jax.Array,
        batch: Batch,
        drift: Any,
        first_row: jax.Array | int,
        scale: jax.Array | int,
    ) -> Sums:
        if local_params:
            # replicas of the other axes start from the same parameters
            params = constrain(add_drift(params, drift), local_specs, mesh)
            params = jax.tree.map(lambda x: jnp.repeat(x, num_replicas // len(x), 0), params)
            params = constrain(params, replica_specs, mesh)

        first_rows, batch = split_by_replica(batch, first_row, placement)
        model_state = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_replicas, *x.shape)), model_state)
        return compute(params, model_state, key, first_rows, batch, scale)

    return sums


def split_by_replica(
    batch: Batch, first_row: jax.Array | int, placement: Placement
) -> tuple[jax.Array, Batch]:
    """Split a batch by replica: return the number of the first row of each replica, (M, R), and its rows.

    Args:
      batch: arrays (M, rows, ...); the returned arrays are (M, R, rows / R, ...), and consecutive rows belong
        to one replica.
      first_row: the number of the batch's first row. Random keys depend on the number of a row in the whole
        batch, but not on the mesh.
      placement: the placement of the batch.
    """
    mesh, replica_axes = placement.mesh, placement.layout.replica_axes
    num_replicas = math.prod(mesh.shape[axis] for axis in replica_axes)
    num_microbatches, num_rows = jax.tree.leaves(batch)[0].shape[:2]
    batch = jax.tree.map(
        lambda x: x.reshape(x.shape[0], num_replicas, num_rows // num_replicas, *x.shape[2:]), batch
    )
    spec = PartitionSpec(None, replica_axes, placement.layout.rules_of_replica()[axes.BATCH])
    numbers = jnp.arange(num_microbatches * num_replicas, dtype=jnp.uint32)
    first_rows = first_row + numbers * (num_rows // num_replicas)
    return (
        first_rows.reshape(num_microbatches, num_replicas),
        constrain(batch, jax.tree.map(lambda _: spec, batch), mesh),
    )


def _make_scan(model: Model, loss: Loss, placement: Placement, specs: Any) -> _Compute:
    """Make the function that scans over microbatches, each through the whole model."""
    mesh, rules = placement.mesh, placement.layout.rules_of_replica()

    def replica_loss(
        params: Any, model_state: Any, key: jax.Array, first_row: jax.Array, batch: Batch, scale: Any
    ) -> tuple[jax.Array, Any]:
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        bound = BoundModel(model, params, model_state, row_key(key, first_row, num_rows, model.draws))
        loss_sum, count, metrics = sum_loss(loss, bound, batch)
        # if all rows are padding, the model's state does not change
        model_state = jax.tree.map(
            lambda new, old: jnp.where(count > 0, new, old), bound.model_state, model_state
        )
        return loss_sum * scale, (loss_sum, count, metrics, model_state)

    in_axes = (0 if placement.synchronisation.keeps_drift else None, 0, None, 0, 0, None)
    sharded = shard_operators(
        replica_loss, placement.layout.operators, mesh.shape, rules[axes.BATCH], batch=4
    )
    grad = map_replicas(value_and_grad(sharded), in_axes, placement, model.axis_name)

    def compute(
        params: Any, model_state: Any, key: jax.Array, first_rows: jax.Array, batch: Batch, scale: Any
    ) -> Sums:
        def microbatch(carry: Any, inputs: Any) -> tuple[Any, None]:
            model_state, sums = carry
            (_, (loss_sum, count, metrics, model_state)), grads = grad(
                params, model_state, key, *inputs, scale
            )
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
            grads = constrain(grads, specs, mesh)
            squares = square_gradients(grads, count) if placement.measures_noise else ()
            found = (loss_sum, count, metrics, grads, squares)
            # in float32, whatever the sums are kept in
            more = jax.tree.map(lambda total, x: (total + x).astype(total.dtype), sums, found)
            return (model_state, more), None

        inputs = (first_rows, batch)
        with activation_rules(rules, mesh, *placement.layout.tracing):
            # the shapes of one microbatch's results are those of the sums
            first = jax.tree.map(lambda x: x[0], inputs)
            (_, (loss_sum, count, metrics, _)), grads = jax.eval_shape(
                grad, params, model_state, key, *first, scale
            )
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (loss_sum, count, metrics, grads))
            # the sums are sharded from the start, like the gradients that are added to them
            squares = GradientSquares(zeros[1], zeros[1]) if placement.measures_noise else ()
            # one microbatch is not added to anything
            dtype = placement.accumulate_dtype if len(first_rows) > 1 else jnp.float32
            grads = jax.tree.map(lambda x: x.astype(dtype), zeros[3])
            zeros = (*zeros[:3], constrain(grads, specs, mesh), squares)
            (model_state, sums), _ = jax.lax.scan(microbatch, (model_state, zeros), inputs)
        loss_sum, count, metrics, grads, squares = sums
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        return Sums(loss_sum, count, metrics, grads, model_state, squares)

    return compute


def _make_pipeline(model: Model, loss: Loss, placement: Placement, specs: Any) -> _Compute:
    """Make the function that runs a pipeline of several stages, see `pipeline.mesh_pipeline`."""
    stages = placement.stages
    assert stages is not None
    # after local steps each replica has parameters of its own, with a leading dim
    has_own = placement.synchronisation.keeps_drift

    def compute(
        params: Any, model_state: Any, key: jax.Array, first_rows: jax.Array, batch: Batch, scale: Any
    ) -> Sums:
        # the schedule needs the number of microbatches, which the batch has
        table = make_table(
            placement.schedule, stages.num_stages, len(first_rows), stages.num_chunks, lockstep=True
        )
        staged = run_over_stages(model, loss, placement, table, has_own=has_own, has_grads=True)
        sums = staged(params, key, first_rows, batch)
        grads = constrain(sums.grads, specs, placement.mesh)
        # microbatches are added up inside the pipeline: only the gradients of replicas are known
        squares = square_gradients(grads, sums.count) if placement.measures_noise else ()
        return sums._replace(grads=grads, model_state=model_state, squares=squares)

    return compute


def run_over_stages(
    model: Model, loss: Loss, placement: Placement, table: Table, *, has_own: bool, has_grads: bool
) -> Callable[[Any, jax.Array, jax.Array, Batch], Sums]:
    """Make a function that executes a schedule: each stage runs its own blocks, each replica its own rows.

    Args:
      model: a model with a chain.
      loss: returns (sum, count), see `loss.Loss`.
      placement: a placement with stages.
      table: the schedule.
      has_own: whether each replica has parameters of its own, with a leading dim.
      has_grads: whether the schedule has backward passes.

    Returns:
      (params, key, first rows (M, R), batch (M, R, rows, ...)) -> sums with a leading dim of replicas.
    """
    assert model.chain is not None
    assert placement.stages is not None
    rules, replicated = placement.layout.rules_of_replica(), PartitionSpec()
    run_stage = partial(
        run_pipeline,
        chain=model.chain,
        loss=loss,
        stages=placement.stages,
        table=table,
        specs=placement.specs.params,
        row_axes=rules[axes.BATCH],
    )

    def replica(params: Any, key: jax.Array, first_rows: jax.Array, batch: Batch) -> Sums:
        num_rows = jax.tree.leaves(batch)[0].shape[1]
        return run_stage(
            params, lambda number: row_key(key, first_rows[number], num_rows, model.draws), batch
        )

    # manual over `pipeline` outside, vmap over replicas inside
    def run(*arguments: Any) -> Sums:
        with activation_rules(rules, jax.sharding.get_abstract_mesh(), *placement.layout.tracing):
            in_axes = (0 if has_own else None, None, 1, 1)
            return map_replicas(replica, in_axes, placement, model.axis_name)(*arguments)

    def compute(params: Any, *arguments: Any) -> Sums:
        def specs(dim: int) -> Any:
            blocks = PartitionSpec(*[None] * dim, axes.PIPELINE)
            return {name: blocks if name == BLOCKS else replicated for name in params}

        grads = specs(1) if has_grads else {}
        return jax.shard_map(
            run,
            mesh=placement.mesh,
            axis_names={axes.PIPELINE},
            in_specs=(specs(int(has_own)), *[replicated] * len(arguments)),
            out_specs=Sums._make([replicated, replicated, replicated, grads, (), ()]),
            check_vma=False,
        )(params, *arguments)

    return compute


def square_gradients(grads: Any, counts: jax.Array) -> GradientSquares:
    """Return the squared norm of each replica's gradient, for use inside jit.

    Args:
      grads: gradients of sums over examples, each array (R, ...), float32.
      counts: float32 (R,), numbers of examples or tokens.

    Returns:
      Squares with arrays (R,).
    """
    norms = [jnp.square(g).reshape(len(g), math.prod(g.shape[1:])).sum(1) for g in jax.tree.leaves(grads)]
    return GradientSquares(jnp.stack(norms).sum(0), jnp.square(counts))


def map_replicas(
    function: Callable[..., Any],
    in_axes: Sequence[int | None],
    placement: Placement,
    axis_name: str | None = None,
) -> Callable[..., Any]:
    """Map the function of one replica over a dim of replicas, for use inside jit.

    Args:
      function: the function of one replica.
      in_axes: for each argument, the dim of its arrays that counts replicas; None if there is no such dim.
      placement: the placement of the state, whose layout has the replica axes.
      axis_name: the name of the dim inside the function, for models with collectives over replicas.

    Returns:
      A function whose results have a leading dim of replicas.
    """
    replica_axes = placement.layout.replica_axes
    if axis_name is None and all(placement.mesh.shape[axis] == 1 for axis in replica_axes):
        return _run_only_replica(function, in_axes)
    # spmd_axis_name shards the leading dim that vmap makes, so each device computes its own replica
    mapped = jax.vmap(function, tuple(in_axes), axis_name=axis_name, spmd_axis_name=replica_axes or None)
    if axis_name is not None or not placement.replica_is_one_cpu or placement.in_parts:
        return mapped
    # every device of the axis data runs it with its own part of the dim of replicas
    specs = [PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axes.DATA) for dim in in_axes]
    by_device = jax.shard_map(
        _run_only_replica(function, in_axes),
        mesh=placement.mesh,
        axis_names={axes.DATA},
        in_specs=tuple(specs),
        out_specs=PartitionSpec(axes.DATA),
        check_vma=False,
    )

    def either(*arguments: Any) -> Any:
        # jax cannot compile a callback, such as that of jax.debug.print, where some axes are manual
        has_callbacks = bool(jax.make_jaxpr(mapped)(*arguments).effects)
        return (mapped if has_callbacks else by_device)(*arguments)

    return either


def _run_only_replica(function: Callable[..., Any], in_axes: Sequence[int | None]) -> Callable[..., Any]:
    """Do what vmap does over a dim of size 1, without that dim inside the function.

    XLA for CPUs has much slower loops for arrays of four dims than of three dims.
    """

    def without(argument: Any, axis: int | None) -> Any:
        return argument if axis is None else jax.tree.map(lambda x: jnp.squeeze(x, axis), argument)

    def only(*arguments: Any) -> Any:
        results = function(*(without(*each) for each in zip(arguments, in_axes, strict=True)))
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)

    return only
