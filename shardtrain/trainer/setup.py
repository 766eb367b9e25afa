"""The pieces of a run: model, optimizer, mesh and placement, and the step across islands made of them.

Where islands hold the stages of a pipeline, a run's pieces are those of its stage. Next: `train.py`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardtrain.axes import PIPELINE
from shardtrain.combine.replicas import Combine
from shardtrain.data import Batch, Batches, Loader
from shardtrain.errors.messages import problems_error
from shardtrain.functional.model import Model
from shardtrain.functional.nnx_model import as_model
from shardtrain.optim.optimizer import Optimizer, make_optimizer
from shardtrain.optim.optimizer_state import evaluated_params, missing_arguments
from shardtrain.optim.separable import coupling_problems
from shardtrain.pipeline.costs import Traced, make_partition
from shardtrain.pipeline.schedule import forward_only, make_table
from shardtrain.pipeline.simulate import simulate
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.report.timeline import figures, heading, unit_seconds, unit_times
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.island_step import IslandStep, make_island_step
from shardtrain.train_step.stage_step import Seats, StageStep
from shardtrain.train_step.state import Placement, make_placement
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import LONG_SECONDS, Coordination
from shardtrain.trainer.resume import BEGINNING


class RunSetup(NamedTuple):
    """A run's model, optimizer and mesh, and how they lie on it; or the stage's that this island has."""

    model: Model
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule | None
    mesh: Mesh
    placement: Placement
    held: StageModel | None = None
    seats: Seats | None = None

    @property
    def whole(self) -> Model:
        """The whole model, also where this island has a stage of it."""
        return self.model if self.held is None else self.held.model


def make_parts(
    run: Run,
    num_islands: int = 1,
    microbatch: Batch | None = None,
    island: int = 0,
    mesh: Mesh | None = None,
) -> RunSetup:
    """Model, optimizer, mesh and placement of a run.

    Args:
      run: the run.
      num_islands: where there are several, replicas are islands, and each averages its own devices.
      microbatch: as the loss is given it, arrays or shapes; a pipeline needs it.
      island: this one.
      mesh: of the run's layout; by default over the devices of this process, or of all of this island.

    Raises:
      ValueError: the mesh does not fit the devices, or the layout not the model.
    """
    model = as_model(run.model, run.names)
    mesh = mesh or make_mesh(run.strategy.layout)
    if num_islands > 1 and run.strategy.across.axis == "pipeline":
        assert microbatch is not None
        return _make_stage_parts(run, model, mesh, num_islands, island, microbatch)
    if run.strategy.across.axis == "pipeline":
        # alone: a mistake where several were to be launched
        Seats(num_islands=1, num_stages=run.strategy.across.partitions or 1, island=0)
    optimizer, learning_rate = make_optimizer(run.optimizer, run.steps, model.dims)
    combine = run.strategy.combine if num_islands == 1 else Combine()
    num_stages, pipeline = mesh.shape[PIPELINE], run.strategy.pipeline
    stages = None
    if num_stages > 1:
        assert microbatch is not None
        stages = make_partition(model, pipeline, num_stages, run.loss, microbatch)
    can_search = num_islands == 1 and combine.is_mean
    if missing := missing_arguments(
        optimizer, jax.eval_shape(model.init, jax.random.key(0))[0], line_search=can_search
    ):
        raise ValueError(missing_text(missing))
    placement = make_placement(
        model, optimizer, run.strategy.layout, mesh, combine, stages, pipeline.schedule
    )
    _check_evaluated(run, placement)
    return RunSetup(model, optimizer, learning_rate, mesh, placement)


def _make_stage_parts(
    run: Run, model: Model, mesh: Mesh, num_islands: int, island: int, microbatch: Batch
) -> RunSetup:
    """Those of the stage that this island holds."""
    strategy, combine = run.strategy, run.strategy.combine
    problems = []
    if mesh.shape[PIPELINE] > 1:
        problems.append(f"the mesh has pipeline={mesh.shape[PIPELINE]}; use pipeline=1 inside each island")
    if jax.process_count() > 1:
        problems.append(f"an island has {jax.process_count()} processes; use one each")
    if combine.on != "gradients" or combine.inside != "mean":
        problems.append(
            f"combine is of {combine.on} and {combine.inside} inside; use gradients and mean, as pipelines"
            " meet in every step"
        )
    if problems:
        raise problems_error("islands cannot hold the stages of a pipeline", problems)
    num_stages = strategy.across.partitions or num_islands
    seats = Seats(num_islands=num_islands, num_stages=num_stages, island=island)
    stages = make_partition(model, strategy.pipeline, num_stages, run.loss, microbatch)
    traced = Traced(model, run.loss, microbatch)
    held = StageModel(model=model, stages=stages, traced=traced, stage=seats.stage)
    stage = held.as_model()
    named = run.optimizer
    if isinstance(named, Optimizer):
        # the norm is that of all stages, see `StageStep`
        named = replace(named, clip=None)
    if num_stages > 1 and (problems := _mixes(named, model.dims, traced)):
        raise problems_error(
            "stages update their own parameters, which would not be the update of the whole model; use"
            " another optimizer (adamw, sgd, lion, muon), and Optimizer(clip=...) for clipping",
            problems,
        )
    optimizer, learning_rate = make_optimizer(named, run.steps, stage.dims)
    own_params = jax.eval_shape(stage.init, jax.random.key(0))[0]
    if missing := missing_arguments(optimizer, own_params, line_search=False):
        raise ValueError(missing_text(missing))
    placement = make_placement(stage, optimizer, strategy.layout, mesh)
    _check_evaluated(run, placement)
    return RunSetup(stage, optimizer, learning_rate, mesh, placement, held, seats)


def _mixes(optimizer: Any, dims: Any, traced: Traced) -> list[str]:
    """Why stages cannot update apart with this optimizer."""
    return [] if isinstance(optimizer, Optimizer) else coupling_problems(optimizer, dims, traced.params)


def missing_text(missing: list[str]) -> str:
    """The error for an optimizer that wants to be given what a step does not have."""
    cure = "use another optimizer, or optax.contrib.reduce_on_plateau, which needs the loss alone"
    if "value_fn" in missing:
        cure = (
            "a line search computes the loss at other parameters, which one island can with --combine mean;"
            f" use these, or {cure.removeprefix('use ')}"
        )
    return (
        f"the optimizer wants to be given {', '.join(missing)} in every update, and a step gives none: {cure}"
    )


def _check_evaluated(run: Run, placement: Placement) -> None:
    """Whether what is to be evaluated is there.

    Raises:
      ValueError: it is not.
    """
    if run.evaluate_with is None:
        return
    if run.strategy.combine.on_deltas:
        raise ValueError(
            "evaluate_with is given, but with deltas each replica has an optimizer and an average of its own;"
            " use --combine-on gradients, or evaluate_with=None"
        )
    abstract = placement.specs.abstract
    jax.eval_shape(
        lambda opt_state, params: evaluated_params(run.evaluate_with, opt_state, params),
        abstract.opt_state,
        abstract.params,
    )


def microbatch_of(run: Run, source: Any) -> Batch:
    """The shapes of a microbatch of all devices; one sample is loaded."""
    rows = max(run.batch // run.strategy.accumulate, 1)
    batch = Batches(source=source, batch=run.batch, seed=run.seed, rows=[0]).load(BEGINNING)
    return {name: np.broadcast_to(x, (rows, *x.shape[1:])) for name, x in batch.items()}


def pipeline_text(run: Run, parts: RunSetup) -> str | None:
    """How a pipeline is cut, and what its schedule makes of it; None without one."""
    stages = parts.placement.stages if parts.held is None else parts.held.stages
    if stages is None:
        return None
    pipeline, microbatches = run.strategy.pipeline, run.strategy.accumulate
    sizes = (stages.num_stages, microbatches, stages.num_chunks)
    table = make_table(pipeline.schedule, *sizes, lockstep=parts.held is None)
    found = figures(table, simulate(table, unit_seconds(table)), unit_times(table))
    return f"{heading(table)}; blocks {','.join(map(str, stages.counts))}\n{found}"


def make_multi_island_step(
    run: Run, parts: RunSetup, together: Coordination, loader: Loader
) -> IslandStep | None:
    """The step across islands, None for one that is alone."""
    combine = run.strategy.combine
    if together.crossing is None:
        return None
    if parts.held is not None:
        return _stage_step(run, parts, parts.held, together, loader)
    return make_island_step(
        parts.model,
        run.loss,
        parts.optimizer,
        parts.placement,
        together.crossing,
        combine,
        parts.learning_rate,
        loader.shard.start,
        together.meet,
    )


def _stage_step(
    run: Run, parts: RunSetup, held: StageModel, together: Coordination, loader: Loader
) -> StageStep:
    islands, seats, crossing = together.islands, parts.seats, together.crossing
    assert islands is not None
    assert seats is not None
    assert crossing is not None
    microbatches, pipeline = run.strategy.accumulate, run.strategy.pipeline
    sizes = (seats.num_stages, microbatches, pipeline.virtual_stages)
    rows = loader.rows_of_microbatch
    shapes = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in held.traced.batch.items()
    }
    return StageStep(
        held=held,
        flow=held.flow(shapes),
        table=make_table(pipeline.schedule, *sizes),
        losses=forward_only(*sizes),
        optimizer=parts.optimizer,
        clip=run.optimizer.clip if isinstance(run.optimizer, Optimizer) else None,
        placement=parts.placement,
        crossing=crossing,
        seats=seats,
        mailbox=islands.mailbox(seats.replica, seats.stage, LONG_SECONDS),
        share=lambda name, value: islands.control.share(name, value, LONG_SECONDS),
        combine=run.strategy.combine,
        learning_rate=parts.learning_rate,
        start_row=loader.shard.start,
    )
