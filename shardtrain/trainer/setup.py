"""Make the model, optimizer, mesh and placement of a run, or of the pipeline stage of this island.

Next: `prepared_run.py`; `run_step.py`, which makes the step of them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardtrain.axes import PIPELINE
from shardtrain.checks.row_draws import FOREIGN, find_draws
from shardtrain.checks.unused_parameters import find_unused_parameters
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Batch, Batches, Position, TokenBatches
from shardtrain.errors.messages import problems_error, refuse
from shardtrain.functional.frozen import parameter_paths
from shardtrain.functional.model import Model, check_float_parameters
from shardtrain.functional.rng import new_key
from shardtrain.functional.traced_loss import trace_few_rows
from shardtrain.optim.optimizer import Optimizer, make_optimizer
from shardtrain.optim.optimizer_state import find_evaluated_params, find_missing_arguments
from shardtrain.optim.schedules import check_rates
from shardtrain.pipeline.cuts import make_partition, make_partitions, trace_parts
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import Placement, make_placement
from shardtrain.train_step.stage_links import PipelineGrid
from shardtrain.train_step.step import trace_operators
from shardtrain.trainer.combinations import (
    check_combinations,
    check_cuts,
    check_order,
    check_separable,
    check_stage_islands,
)
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.sources import make_batches

FIRST_POSITION = Position(epoch=0, index=0)

MOST_UNUSED = 8
"""Largest number of unused parameters that are named."""


class RunSetup(NamedTuple):
    """The model and optimizer of a run, or of this island's stage, and their placement on the mesh.

    Args:
      model: the whole model, or the stage as a model.
      optimizer: the optimizer of the model's parameters.
      learning_rate: step -> rate if the optimizer has a schedule, else None.
      mesh: the mesh of this island.
      placement: the placement of the state on the mesh.
      stage_model: the stage that this island holds; None if it holds the whole model.
      grid: the stage and replica of each island; None if each holds the whole model.
      unused: paths of the parameters of the whole model that the loss does not depend on.
      cuts: the partition of each pipeline if islands are stages, else ().
    """

    model: Model
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule | None
    mesh: Mesh
    placement: Placement
    stage_model: StageModel | None = None
    grid: PipelineGrid | None = None
    unused: tuple[str, ...] = ()
    cuts: tuple[Partition, ...] = ()

    @property
    def whole_model(self) -> Model:
        """The whole model, also if this island has only a stage of it."""
        return self.model if self.stage_model is None else self.stage_model.model


def make_setup(
    run: Run,
    num_islands: int = 1,
    microbatch: Batch | None = None,
    island: int = 0,
    mesh: Mesh | None = None,
    shapes: Sequence[Batch] = (),
) -> RunSetup:
    """Make the model, optimizer, mesh and placement of a run.

    Args:
      run: the run.
      num_islands: number of islands; if several, each is one replica and averages over its own devices.
      microbatch: a batch as the loss receives it, arrays or shapes; needed for a pipeline and to find unused
        parameters.
      island: number of this island.
      mesh: the mesh of the run's layout; by default over all devices of this island.
      shapes: batches of each length; () if all have the shapes of the microbatch.

    Raises:
      ValueError: the mesh does not fit the devices, or the layout does not fit the model.
    """
    model = make_model(run)
    check_float_parameters(model)
    if isinstance(run.optimizer, Optimizer):
        check_rates(run.optimizer.rates, [p for p in parameter_paths(model) if p not in model.frozen])
    mesh = mesh or make_mesh(run.strategy.layout)
    unused = () if microbatch is None else find_unused(run, model, microbatch)
    if microbatch is not None:
        model = name_draws(run, model, shapes or [microbatch], mesh, num_islands)
    if num_islands > 1 and run.strategy.across.axis == "pipeline":
        assert microbatch is not None
        check_stage_islands(run, mesh)
        num_stages = run.strategy.across.partitions or num_islands
        grid = PipelineGrid(num_islands=num_islands, num_stages=num_stages, island=island)
        return _make_stage_setup(run, model, mesh, grid, microbatch, unused)
    if run.strategy.across.axis == "pipeline":
        # a single island: refuse partitions that need several
        PipelineGrid(num_islands=1, num_stages=run.strategy.across.partitions or 1, island=0)
    optimizer, learning_rate = make_optimizer(run.optimizer, run.steps, model.dims, unused, model.frozen)
    is_alone = num_islands == 1 and not run.elastic.islands
    synchronisation = run.strategy.synchronisation if is_alone else Synchronisation()
    stages: Partition | None = None
    if (num_stages := mesh.shape[PIPELINE]) > 1:
        check_combinations(run, "pipeline")
        assert microbatch is not None
        stages = make_partition(model, run.strategy.pipeline, num_stages, run.loss, microbatch)
        check_order(run.optimizer, model.dims, jax.eval_shape(model.init, new_key(0))[0], stages)
    if num_islands > 1 and run.strategy.synchronisation.on_deltas:
        check_combinations(run, "alone")
    _check_arguments(optimizer, model, line_search=is_alone and synchronisation.is_mean)
    placement = make_placement(
        model,
        optimizer,
        run.strategy.layout,
        mesh,
        synchronisation=synchronisation,
        stages=stages,
        schedule=run.strategy.pipeline.schedule,
        scales_loss=run.strategy.scales_loss,
        in_float16=run.strategy.compute_dtype == "float16",
        measures_noise=run.gradient_noise_scale,
        accumulate_dtype=run.strategy.accumulate_dtype,
        offload=run.strategy.offload,
    )
    _check_evaluated(run, placement)
    check_noise(run, placement, num_islands)
    if run.strategy.layout.operators and microbatch is not None:
        trace_operators(model, run.loss, microbatch, placement.layout, mesh).check()
    return RunSetup(model, optimizer, learning_rate, mesh, placement, unused=unused)


def find_unused(run: Run, model: Model, microbatch: Batch) -> tuple[str, ...]:
    """Return the paths of the trained parameters that the loss does not depend on."""

    def trace(num_rows: int) -> tuple[str, ...]:
        rows = {
            name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in microbatch.items()
        }
        return find_unused_parameters(model, run.loss, rows)

    unused, _ = trace_few_rows(trace, next(iter(microbatch.values())).shape[0])
    return tuple(path for path in unused if path not in model.frozen)


def format_unused(unused: Sequence[str], optimizer: Any) -> str:
    """Format the unused parameters, and whether weight decay changes them.

    >>> format_unused(["bias", "kernel"], Optimizer(weight_decay=0))
    '2 parameters cannot change the loss, their gradient is always zero: bias, kernel'
    """
    shown = [*unused[:MOST_UNUSED], *(["..."] if len(unused) > MOST_UNUSED else [])]
    number, their = (f"{len(unused)} parameters", "their") if len(unused) > 1 else ("1 parameter", "its")
    text = f"{number} cannot change the loss, {their} gradient is always zero: {', '.join(shown)}"
    if not isinstance(optimizer, Optimizer) or not optimizer.weight_decay:
        return text
    if optimizer.decay_unused:
        keep = "not with decay_unused=False of the optimizer"
        return f"{text}; weight decay shrinks matrices all the same ({keep})"
    return f"{text}; not decayed"


def _make_stage_setup(
    run: Run, model: Model, mesh: Mesh, grid: PipelineGrid, microbatch: Batch, unused: tuple[str, ...]
) -> RunSetup:
    """Make the setup of the stage of this island."""
    # cut the model: from here on this island has the model of its stage
    traced = trace_parts(model, run.loss, microbatch)
    cuts = make_partitions(traced, run.strategy.pipeline, grid.num_stages, grid.num_replicas)
    check_cuts(run, traced, cuts, mesh, has_blocks=model.chain is not None)
    stage_model = StageModel(model=model, stages=cuts[grid.replica], traced=traced, stage=grid.stage)
    stage = stage_model.make_stage_model()
    named = run.optimizer
    if isinstance(named, Optimizer):
        # clipping needs the norm over all stages, which `StageCompute` computes
        named = replace(named, clip=None)
    # an optimizer that couples parameters of several stages cannot be run by stages
    if grid.num_stages > 1:
        check_separable(named, model.dims, traced)
    optimizer, learning_rate = make_optimizer(named, run.steps, stage.dims, unused, model.frozen)
    _check_arguments(optimizer, stage, line_search=False)
    placement = make_placement(stage, optimizer, run.strategy.layout, mesh)
    _check_evaluated(run, placement)
    return RunSetup(stage, optimizer, learning_rate, mesh, placement, stage_model, grid, unused, tuple(cuts))


def _check_arguments(optimizer: optax.GradientTransformation, model: Model, *, line_search: bool) -> None:
    """Refuse an optimizer whose update needs arguments that a step does not pass.

    Raises:
      ValueError: it needs such an argument.
    """
    params = jax.eval_shape(model.init, new_key(0))[0]
    missing = find_missing_arguments(optimizer, params, line_search=line_search)
    if not missing:
        return
    fix = "use another optimizer, or optax.contrib.reduce_on_plateau, which needs only the loss"
    if "value_fn" in missing:
        fix = (
            "a line search computes the loss at other parameters, which needs one island and --combine mean;"
            f" use these, or {fix.removeprefix('use ')}"
        )
    raise ValueError(
        f"the optimizer needs {', '.join(missing)} in every update, which a step does not pass: {fix}"
    )


def _check_evaluated(run: Run, placement: Placement) -> None:
    """Check that the optimizer keeps the parameters that `evaluate_with` asks for.

    Raises:
      ValueError: it does not.
    """
    if run.evaluate_with is None:
        return
    if run.strategy.synchronisation.on_deltas:
        raise ValueError(
            "evaluate_with is given, but with deltas each replica has its own optimizer and average; use"
            " --combine-on gradients, or evaluate_with=None"
        )
    abstract = placement.specs.abstract
    jax.eval_shape(
        lambda opt_state, params: find_evaluated_params(run.evaluate_with, opt_state, params),
        abstract.opt_state,
        abstract.params,
    )


def make_microbatch(run: Run, source: Any) -> Batch:
    """Return a microbatch with the shapes of the first batch; only one sample is loaded."""
    batches = make_batches(run, source)
    rows = max(batches.num_rows(FIRST_POSITION) // run.strategy.accumulate, 1)
    batch = load_first_rows(batches, 1)
    return {name: np.broadcast_to(x, (rows, *x.shape[1:])) for name, x in batch.items()}


def load_first_rows(batches: Batches | TokenBatches, number: int) -> Batch:
    """Load the first rows of the first batch; rows are repeated if it has fewer."""
    num_rows = batches.num_rows(FIRST_POSITION)
    rows = [row % num_rows for row in range(number)]
    if isinstance(batches, Batches):
        return replace(batches, rows=rows).load(FIRST_POSITION)
    return replace(batches, rows={num_rows: rows}).load(FIRST_POSITION)


def check_noise(run: Any, placement: Placement, num_islands: int) -> None:
    """Check that a step adds up at least two gradients, from which the gradient noise scale is estimated.

    Args:
      run: see `config.Run`.
      placement: the placement of an island.
      num_islands: number of islands.

    Raises:
      ValueError: a step computes a single gradient.
    """
    if not run.gradient_noise_scale:
        return
    num_replicas = math.prod(placement.mesh.shape[axis] for axis in placement.layout.replica_axes)
    microbatches = run.strategy.accumulate if placement.stages is None else 1
    if num_replicas * microbatches * num_islands > 1:
        return
    add = "--mesh data=2" if placement.stages is not None else "--accumulate 2, or --mesh data=2"
    inside = " (a pipeline adds up its own)" if placement.stages is not None else ""
    raise ValueError(
        "gradient_noise_scale is on, which compares the gradients of parts of a batch with the gradient of"
        f" the batch, and a step has 1 island, 1 replica and 1 microbatch{inside}; use {add}, or leave it out"
    )


def count_parts(run: Run, mesh: Mesh, num_islands: int) -> int:
    """Return the number of parts into which the rows of a batch are split, each with its own loss."""
    num_replicas = math.prod(mesh.shape[axis] for axis in run.strategy.layout.replica_axes)
    return num_replicas * num_islands * run.strategy.accumulate


def name_draws(run: Run, model: Model, shapes: Sequence[Batch], mesh: Mesh, num_islands: int) -> Model:
    """Return the model with its random draws, found by tracing its losses of training and held-out data.

    Args:
      run: the run.
      model: the whole model.
      shapes: batches as the loss receives them, arrays or shapes; one for each shape of a row.
      mesh: the mesh of this island.
      num_islands: number of islands.

    Raises:
      ValueError: random draws depend on how rows are split, or do not use the key of the step.
    """
    traced = [find_draws(model, run.loss, batch, train) for batch in shapes for train in (True, False)]
    problems = list(dict.fromkeys(problem for found in traced for problem in found.problems))
    if problems and count_parts(run, mesh, num_islands) > 1:
        raise problems_error(
            "losses would differ from one device, because random numbers would depend on how rows are split",
            problems,
        )
    # without a split they would still be the same in every step
    refuse(
        "the rows of a batch would get the same random numbers in every step",
        [problem for problem in problems if problem.endswith(FOREIGN)],
    )
    # a batch that is not split needs no record of draws
    draws = None if problems else tuple(dict.fromkeys(draw for found in traced for draw in found.draws))
    return replace(model, draws=draws)
