"""Convert a run to planner subjects and a plan to a strategy, also with shardings of operators."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax

from shardtrain import axes
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Batches, RowSplit, place, split_over_islands
from shardtrain.errors.options import write_compact
from shardtrain.functional.model import group_by_path
from shardtrain.functional.rng import new_key
from shardtrain.functional.traced_loss import loss_count
from shardtrain.islands.cluster import IslandKind, range_text
from shardtrain.optim.optimizer import make_optimizer
from shardtrain.plan.advice.bottleneck import PARTS
from shardtrain.plan.devices import find_device
from shardtrain.plan.island_stages import StagesPlan
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.operators.graph import Operator as PlannedOperator
from shardtrain.plan.operators.search import LayoutSearch
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import RankedChoice
from shardtrain.plan.space import REMATS, Space
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import ANY_DEVICE, Target
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.sharding.single_arrays import Shards
from shardtrain.train_step.placement import init_state
from shardtrain.train_step.step import make_step, trace_operators
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.setup import FIRST_POSITION, make_microbatch, make_setup
from shardtrain.trainer.sources import make_batches
from shardtrain.trainer.strategy import Strategy

MOST_ROWS = 64
"""Rows of the first batch from which the mean count of the loss in a row is computed."""


def make_subjects(run: Run, source: Any, kinds: Sequence[IslandKind]) -> list[Subject]:
    """Return the planner's subject for each kind of islands; kinds with the same devices and dtype share one.

    Args:
      run: the run; its remat is kept if given.
      source: its training samples; some are loaded, and all must have the same shapes.
      kinds: the kinds; their sections of a strategy may give a dtype.

    Raises:
      ValueError: the model cannot be computed as the strategy says, batches are counted in tokens, or the
        samples have different shapes.
    """
    if run.batch_unit == "tokens":
        raise ValueError(
            f"batch is {run.batch} tokens, and a plan is for batches of equal rows; give --batch-unit"
            " examples and the number of rows of a typical batch, and samples padded to its length"
        )
    num_rows = min(run.batch, MOST_ROWS, max(len(source), 1))
    rows = Batches(source=source, batch=run.batch, seed=run.seed, rows=range(num_rows)).load(FIRST_POSITION)
    batch = {name: jax.ShapeDtypeStruct((run.batch, *x.shape[1:]), x.dtype) for name, x in rows.items()}
    found: dict[tuple[str | None, Target], Subject] = {}
    targets = [_target(kind) for kind in kinds]
    dtypes = [kind.strategy.get("compute_dtype", run.strategy.compute_dtype) for kind in kinds]
    for dtype, target in dict.fromkeys(zip(dtypes, targets, strict=True)):
        # one optimizer for all remat policies: it depends only on the model's names
        own = replace(run, strategy=replace(run.strategy, compute_dtype=dtype))
        model = make_model(own)
        optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims, frozen=model.frozen)
        count = loss_count(model, run.loss, rows)
        found[dtype, target] = Subject(
            model=partial(make_model, own),
            loss=run.loss,
            optimizer=optimizer,
            batch=batch,
            unit=run.unit,
            row_units=None if count is None else count / num_rows,
            target=target,
        )
    return [found[key] for key in zip(dtypes, targets, strict=True)]


def _target(kind: IslandKind) -> Target:
    name = ANY_DEVICE if kind.device is None else kind.device.name or ANY_DEVICE
    known = find_device(name)
    # only GPUs have programs for a single device; a single CPU is planned as several
    return Target(name, one_device=(kind.devices or 1) == 1 and known is not None and known.platform == "gpu")


def make_space(run: Run, mesh: Mapping[str, int]) -> Space:
    """Return the search space of a plan.

    Args:
      run: the run; its remat policy and sharding rules are kept.
      mesh: sizes of axes that are fixed.
    """
    remats = REMATS if run.strategy.remat is None else (None,)
    return Space(layout=replace(run.strategy.layout, mesh=dict(mesh), operators={}), remats=remats)


def make_planned_strategy(run: Run, plan: ClusterPlan) -> Strategy:
    """Return a run's strategy with the best choice of a plan, and sections for islands that differ.

    `strategy_text` writes it to a file for `train --strategy FILE`.
    """
    choices = [each.plan.ranked[0].choice for each in plan.kinds]
    given = run.strategy if len(plan.shares) > 1 else _strategy_alone(run.strategy, plan.kinds[0].kind)
    strategy = replace(apply_choice(given, choices[0]), predicted=_predict(plan))
    if len(plan.shares) == 1:
        return strategy
    sections, first = {}, 0
    for kind, choice in zip(plan.kinds, choices, strict=True):
        numbers = range_text(first, kind.kind.count)
        first += kind.kind.count
        sections[numbers] = {**kind.kind.strategy, **_section(run, choice)}
    across = replace(
        strategy.across, axis="data", partitions=None, shares=tuple(float(rows) for rows in plan.shares)
    )
    if not math.isinf(plan.link_bytes_per_second) and strategy.synchronisation.is_mean:
        across = replace(across, gradient_parts=plan.num_programs)
    return replace(strategy, across=across, islands=sections)


def _strategy_alone(strategy: Strategy, kind: IslandKind) -> Strategy:
    """Return the strategy of one island of a kind, as it is planned, without what only several have."""
    own = replace(strategy, islands={"0": kind.strategy}).select_island(0, "")
    across = replace(own.across, axis="data", partitions=None, shares=None, share_limits=None)
    synchronisation = Synchronisation() if own.synchronisation.on_deltas else own.synchronisation
    return replace(own, across=across, synchronisation=synchronisation, islands={})


def make_staged_strategy(run: Run, stages: StagesPlan) -> Strategy:
    """Return a run's strategy in which each island is a stage of a pipeline."""
    pipeline = replace(
        run.strategy.pipeline,
        schedule="1f1b",
        virtual_stages=1,
        stages=stages.cuts,
        in_flight=stages.in_flight,
    )
    slowest, several = stages.slowest, len(stages.pipelines) > 1
    across = replace(
        run.strategy.across,
        axis="pipeline",
        partitions=stages.partitions if several else None,
        shares=tuple(map(float, stages.rows)) if several else None,
    )
    return replace(
        run.strategy,
        layout=replace(
            run.strategy.layout,
            mesh={axes.DATA: -1},
            operators={},
            sequence_sharded=False,
            collective_matmul=False,
        ),
        accumulate=stages.accumulate,
        across=across,
        pipeline=pipeline,
        islands={},
        predicted=_name_parts(*slowest.parts_seconds, stages.join_seconds),
    )


def find_choices(strategy: Strategy, plan: ClusterPlan) -> list[Choice]:
    """Return the choice of a strategy for each kind of islands of a plan.

    Raises:
      ValueError: the stages of a pipeline are not equal, which is not predicted.
    """
    found, first = [], 0
    for each in plan.kinds:
        name = each.kind.device.name if each.kind.device is not None else None
        own = strategy.select_island(first, name or "")
        first += each.kind.count
        if own.pipeline.stages != "equal":
            raise ValueError(
                f"stages is {own.pipeline.stages!r}, and a step is predicted for equal stages only; use"
                " --stages equal"
            )
        has_stages = own.layout.mesh.get(axes.PIPELINE, 1) != 1
        found.append(
            Choice(
                layout=own.layout,
                accumulate=own.accumulate,
                remat=write_compact(own.remat),
                schedule=own.pipeline.schedule,
                virtual_stages=own.pipeline.virtual_stages if has_stages else 1,
            )
        )
    return found


def apply_shares(plan: ClusterPlan, strategy: Strategy, choices: Sequence[Choice]) -> ClusterPlan:
    """Return a plan with the rows that the shares of a strategy give each island.

    Args:
      plan: the plan; its rows stay if the strategy gives no weights.
      strategy: the strategy.
      choices: the choice for each kind of islands, see `find_choices`.

    Raises:
      ValueError: there are not as many weights as islands.
    """
    weights = strategy.across.shares
    if not isinstance(weights, tuple) or len(plan.shares) == 1:
        return plan
    if len(weights) != len(plan.shares):
        raise ValueError(
            f"shares of the strategy has {len(weights)} weights, and the cluster has {len(plan.shares)}"
            " islands; give one each"
        )
    multiples = []
    for each, choice in zip(plan.kinds, choices, strict=True):
        sizes = axis_sizes(choice.layout.mesh, each.kind.devices or 1)
        split = RowSplit.of(sizes, choice.layout.batch_axes, choice.accumulate)
        multiples += [split.multiple] * each.kind.count
    rows = split_over_islands(sum(plan.shares), weights, multiples)
    kinds, first = [], 0
    for each in plan.kinds:
        most = max(rows[first : first + each.kind.count])
        kinds.append(replace(each, rows=most, subject=each.subject.share(most)))
        first += each.kind.count
    return replace(plan, kinds=tuple(kinds), shares=tuple(rows))


def _predict(plan: ClusterPlan) -> dict[str, float]:
    """Return the predicted seconds of a step of the first island, by part."""
    seconds = plan.kinds[0].plan.ranked[0].prediction.seconds
    collectives = sum(seconds.collectives.values())
    return _name_parts(seconds.compute, seconds.bubble, collectives, seconds.update, plan.join_seconds)


def _name_parts(*seconds: float) -> dict[str, float]:
    return {name: float(value) for name, value in zip(PARTS, seconds, strict=True)}


def apply_choice(strategy: Strategy, choice: Choice) -> Strategy:
    pipeline = replace(
        strategy.pipeline,
        schedule=choice.schedule,
        virtual_stages=choice.virtual_stages,
        stages="equal",
        in_flight=1,
    )
    return replace(
        strategy,
        layout=choice.layout,
        accumulate=choice.accumulate,
        remat=choice.remat or strategy.remat,  # pyright: ignore[reportArgumentType]
        pipeline=pipeline,
    )


def _section(run: Run, choice: Choice) -> dict[str, Any]:
    """Return the fields of one kind of islands, as in a file."""
    layout, remat = choice.layout, choice.remat or write_compact(run.strategy.remat)
    fields: dict[str, Any] = {
        "mesh": dict(layout.mesh), "zero": layout.zero, "sequence_sharded": layout.sequence_sharded,
    }  # fmt: skip
    if layout.collective_matmul:
        fields["collective_matmul"] = True
    if axes.CONTEXT in layout.mesh:
        fields["context_attention"] = layout.context_attention
    found = {"layout": fields, "accumulate": choice.accumulate}
    return found if remat is None else {**found, "remat": remat}


STEPS = 7
"""Number of steps to measure, after one that compiles and one that warms up."""


def measure_step_seconds(run: Run, source: Any, choice: Choice) -> float:
    """Measure the median seconds of a step on this machine's devices.

    Args:
      run: the run; its layout, microbatches, remat policy and pipeline are replaced.
      source: its training samples.
      choice: the layout, microbatches, remat policy and pipeline.

    Raises:
      ValueError: the choice does not fit the run.
    """
    run = replace(run, strategy=apply_choice(run.strategy, choice))
    setup = make_setup(run, microbatch=make_microbatch(run, source))
    batch = make_batches(run, source).load(FIRST_POSITION)
    placed = place(batch, setup.mesh, run.strategy.layout.batch_axes, choice.accumulate)
    state: Any = init_state(setup.model, setup.optimizer, setup.placement, run.seed)
    step = make_step(setup.model, run.loss, setup.optimizer, setup.placement, setup.learning_rate)
    seconds = []
    for _ in range(STEPS + 2):
        began = time.perf_counter()
        state, metrics = step(state, placed)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def make_operator_choice(
    run: Run, batch: Mapping[str, jax.ShapeDtypeStruct], found: LayoutSearch
) -> RankedChoice:
    """Return what a search found as a choice: its layout names the operators that rules do not shard.

    Args:
      run: the run.
      batch: name -> shape and dtype.
      found: the result of the search.

    Raises:
      ValueError: it shards an operator that a run does not.
    """
    result, choice = found.result, found.layout.choice
    space, model = result.best.space, make_model(run)
    shapes = {p: x.shape for p, x in group_by_path(jax.eval_shape(model.init, new_key(0))[0]).items()}
    mesh = abstract_mesh(axis_sizes(choice.layout.mesh, prod(choice.layout.mesh.values())))
    operators = trace_operators(model, run.loss, batch, choice.layout, mesh).operators
    table: dict[str, Shards] = {}
    for lead, members in space.graph.groups.items():
        if result.best.shardings[lead] == result.start.shardings[lead]:
            continue
        for number in members:
            each = space.graph.operators[number]
            if number == lead and each.scope not in operators:
                raise ValueError(
                    f"a run computes {each.scope} by code for each device, and the search would shard it;"
                    " use the best layout"
                )
            if number == lead:
                dims = operators[each.scope].dims
            elif each.kind == "update":
                dims = {str(n): size for n, size in enumerate(shapes[each.scope])}
            else:
                continue
            pairs = zip(space.sizes, result.best.shardings[number], strict=True)
            split = {axis: dim for axis, dim in pairs if dim and axis != axes.DATA}
            table[each.scope] = _fit(dims, space.sizes, _list_named(each, dims, split))
    return RankedChoice(
        choice=replace(choice, layout=replace(choice.layout, operators=table)),
        prediction=found.prediction,
        fits=result.best.judged.fits,
        change=found.change,
    )


def _list_named(
    each: PlannedOperator, dims: Mapping[str, int], split: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return axis -> the dims of an operator with the name that it splits; sums have the same sizes."""
    found = {}
    for axis, name in split.items():
        summed = [dim for dim, size in dims.items() if dim.startswith("sum") and size == each.sizes[name]]
        found[axis] = [str(n) for n, known in enumerate(each.result) if known == name] or summed
    return found


def _fit(dims: Mapping[str, int], sizes: Mapping[str, int], wanted: Mapping[str, Sequence[str]]) -> Shards:
    """Return axis -> the first of its dims that it divides; an axis without one splits nothing."""
    left, found = dict(dims), {}
    for axis, options in wanted.items():
        dim = next((dim for dim in options if dim in left and left[dim] % sizes[axis] == 0), None)
        if dim is not None:
            left[dim] //= sizes[axis]
            found[axis] = dim
    return found
