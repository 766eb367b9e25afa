"""A run as the planner takes it, the plan of a cluster as a strategy, and runs of one step to measure it."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from shardtrain import axes
from shardtrain.data import Batches, RowSplit, place, split_over_islands
from shardtrain.functional.model import Model
from shardtrain.functional.remat_policies import REMAT_POLICIES
from shardtrain.functional.traced_loss import loss_count
from shardtrain.islands.cluster import IslandKind
from shardtrain.islands.sections import range_text
from shardtrain.optim.optimizer import Optimizer, make_optimizer
from shardtrain.plan.advice.bottleneck import PARTS
from shardtrain.plan.compile import Figures, compile_step, describe_devices, figures
from shardtrain.plan.devices import find_device
from shardtrain.plan.island_stages import StagesPlan
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.prediction import Choice
from shardtrain.plan.space import REMATS, Space
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import ANY_DEVICE, Target
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import abstract_mesh, make_mesh
from shardtrain.train_step.gradient_pieces import PlannedParts
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.island_gradients import plan_parts
from shardtrain.train_step.step import make_step
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.setup import FIRST_POSITION, make_microbatch, make_setup
from shardtrain.trainer.sources import make_batches
from shardtrain.trainer.strategy import Strategy

MOST_ROWS = 64
"""Rows of the first batch that are loaded for what the loss counts in a row, on average."""


def make_subjects(run: Run, source: Any, kinds: Sequence[IslandKind]) -> list[Subject]:
    """Return what is planned for each kind of islands: alike on the same devices in the same dtype.

    Args:
      run: the run; its remat, if it gives one, is kept.
      source: its training samples, of which some are loaded: all must have the same shapes.
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
        # one optimizer for all ways to recompute: it is made for the model's names alone
        model = _model(run, dtype, None)
        optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims, frozen=model.frozen)
        count = loss_count(model, run.loss, rows)
        found[dtype, target] = Subject(
            model=partial(_model, run, dtype),
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
    # forms for one device alone are those of GPUs; the plan of a single CPU is that of several
    return Target(name, one_device=(kind.devices or 1) == 1 and known is not None and known.platform == "gpu")


def _model(run: Run, dtype: str | None, remat: str | None) -> Model:
    strategy = replace(run.strategy, compute_dtype=dtype, remat=remat or run.strategy.remat)
    return make_model(replace(run, strategy=strategy))


def make_space(run: Run, mesh: Mapping[str, int]) -> Space:
    """Return what a plan of a run may choose.

    Args:
      run: what its strategy says of recomputation and rules is kept.
      mesh: sizes of axes that are fixed.
    """
    remats = REMATS if run.strategy.remat is None else (None,)
    return Space(layout=replace(run.strategy.layout, mesh=dict(mesh)), remats=remats)


def make_planned_strategy(run: Run, plan: ClusterPlan) -> Strategy:
    """Return a run's strategy with the best choice of a plan, and sections for islands that differ.

    The strategy reads back from a file (`strategy_text`), and `train --strategy FILE` takes it.
    """
    choices = [each.plan.ranked[0].choice for each in plan.kinds]
    strategy = replace(with_choice(run.strategy, choices[0]), predicted=_predict(plan))
    if len(plan.shares) == 1:
        return replace(strategy, islands={})
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


def make_staged_strategy(run: Run, stages: StagesPlan) -> Strategy:
    """Return a run's strategy with each island a stage of a pipeline, which `train --strategy` takes."""
    pipeline = replace(run.strategy.pipeline, schedule="1f1b", virtual_stages=1, stages=stages.cuts)
    slowest, several = stages.slowest, len(stages.pipelines) > 1
    seconds = (
        slowest.compute_seconds,
        slowest.bubble_seconds,
        slowest.collectives_seconds,
        slowest.update_seconds,
        stages.join_seconds,
    )
    across = replace(
        run.strategy.across,
        axis="pipeline",
        partitions=stages.partitions if several else None,
        shares=tuple(map(float, stages.rows)) if several else None,
    )
    return replace(
        run.strategy,
        layout=replace(
            run.strategy.layout, mesh={axes.DATA: -1}, sequence_sharded=False, collective_matmul=False
        ),
        accumulate=stages.accumulate,
        across=across,
        pipeline=pipeline,
        islands={},
        predicted={name: float(value) for name, value in zip(PARTS, seconds, strict=True)},
    )


def find_choices(strategy: Strategy, plan: ClusterPlan) -> list[Choice]:
    """Return the choice that a strategy makes for each kind of islands of a plan.

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
                f"stages is {own.pipeline.stages!r}, and a step is predicted for equal stages alone; use"
                " --stages equal"
            )
        has_stages = own.layout.mesh.get(axes.PIPELINE, 1) != 1
        found.append(
            Choice(
                layout=own.layout,
                accumulate=own.accumulate,
                remat=own.remat,
                schedule=own.pipeline.schedule,
                virtual_stages=own.pipeline.virtual_stages if has_stages else 1,
            )
        )
    return found


def apply_shares(
    plan: ClusterPlan, strategy: Strategy, choices: Sequence[Choice], batch_rows: int
) -> ClusterPlan:
    """Return a plan with the rows that a strategy's shares give each island, as a run splits its batch.

    Args:
      plan: the plan; its own rows stay where the strategy gives no weights.
      strategy: the strategy.
      choices: of each kind of islands, see `find_choices`.
      batch_rows: of the whole batch.

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
    rows = split_over_islands(batch_rows, weights, multiples)
    kinds, first = [], 0
    for each in plan.kinds:
        kinds.append(replace(each, rows=max(rows[first : first + each.kind.count])))
        first += each.kind.count
    return replace(plan, kinds=tuple(kinds), shares=tuple(rows))


def _predict(plan: ClusterPlan) -> dict[str, float]:
    """Return the predicted seconds of a step of the first island, by part."""
    seconds = plan.kinds[0].plan.ranked[0].prediction.seconds
    parts = (
        seconds.compute,
        seconds.bubble,
        sum(seconds.collectives.values()),
        seconds.update,
        plan.join_seconds,
    )
    return {name: float(value) for name, value in zip(PARTS, parts, strict=True)}


def with_choice(strategy: Strategy, choice: Choice) -> Strategy:
    pipeline = replace(
        strategy.pipeline, schedule=choice.schedule, virtual_stages=choice.virtual_stages, stages="equal"
    )
    return replace(
        strategy,
        layout=choice.layout,
        accumulate=choice.accumulate,
        remat=choice.remat or strategy.remat,
        pipeline=pipeline,
    )


def _section(run: Run, choice: Choice) -> dict[str, Any]:
    """Return the fields of one kind of islands, as a file has them."""
    found: dict[str, Any] = {"layout": _layout(choice.layout), "accumulate": choice.accumulate}
    remat = choice.remat or run.strategy.remat
    return found if remat is None else {**found, "remat": remat}


def _layout(layout: Layout) -> dict[str, Any]:
    found = {"mesh": dict(layout.mesh), "zero": layout.zero, "sequence_sharded": layout.sequence_sharded}
    if layout.collective_matmul:
        found["collective_matmul"] = True
    return {**found, "context_attention": layout.context_attention} if axes.CONTEXT in layout.mesh else found


STEPS = 7
"""Steps that are measured, after one that compiles and one that warms up."""


def probe_seconds(run: Run, source: Any, choice: Choice) -> float:
    """Return the seconds of a step on this machine's devices, the median of `STEPS`.

    Args:
      run: the run; its layout, microbatches, recomputation and pipeline are replaced.
      source: its training samples.
      choice: the way to run it.

    Raises:
      ValueError: the run refuses it.
    """
    run = replace(run, strategy=with_choice(run.strategy, choice))
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


def plan_sent_parts(run: Run, source: Any, sizes: Mapping[str, int]) -> PlannedParts:
    """Return what an island of a run sends after each program of `--gradient-parts`, and when.

    Args:
      run: the run; its strategy is that of island 0, whose parts all islands send.
      source: its training samples, of which one is loaded.
      sizes: axis -> size of the mesh of an island.
    """
    rows = make_microbatch(run, source)
    # where the optimizer's state is kept changes no gradient, and needs devices
    on_device = replace(run, strategy=replace(run.strategy, offload="none"))
    parts = make_setup(on_device, num_islands=2, microbatch=rows, mesh=abstract_mesh(sizes))
    across = run.strategy.across
    return plan_parts(
        make_gradients(parts.model, run.loss, parts.placement, mean=False),
        parts.placement,
        run.strategy.synchronisation,
        across.reduce_dtype,
        across.num_gradient_programs,
        {name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in rows.items()},
    )


def compile_figures(run: Run, kind: str, sizes: Mapping[str, int], num_rows: int | None = None) -> Figures:
    """Compile the step of a run and read its figures; the data is prepared in a temporary folder.

    Args:
      run: the run; its strategy is that of one island.
      kind: of the devices, see `plan.compile.described_devices`.
      sizes: axis -> size.
      num_rows: rows of this island, with padding; None: the whole batch.

    Raises:
      ValueError: unknown or too few devices, or a layout or batch that does not fit.
      ImportError: an extra is not installed.
    """
    mesh = make_mesh(run.strategy.layout, describe_devices(kind, math.prod(sizes.values())))
    with TemporaryDirectory() as folder:
        rows = make_microbatch(run, run.data.train(Path(folder)))
    parts = make_setup(run, microbatch=rows, mesh=mesh)
    accumulate = run.strategy.accumulate
    num_rows = run.batch if num_rows is None else num_rows
    if run.batch_unit == "tokens":
        # those of the first batch, with padding
        split = RowSplit.of(sizes, run.strategy.layout.batch_axes, accumulate)
        num_rows = split.pad_rows(len(rows["weights"]) * accumulate)
    batch = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in rows.items()}
    compiled = compile_step(
        parts.model, run.loss, parts.optimizer, parts.placement, batch, microbatches=accumulate
    )
    return figures(compiled, sizes)


def memory_changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield (option, the run with it) of each option that the run does not have, and that may save memory.

    Args:
      run: the run; its strategy is that of one island.
    """
    strategy, model = run.strategy, run.model
    remat = strategy.remat or getattr(model, "remat", None)
    for policy in ("none", *REMAT_POLICIES):
        if policy != remat:
            yield f"--remat {policy}", replace(run, strategy=replace(strategy, remat=policy))
    more = 2 * strategy.accumulate
    yield f"--accumulate {more}", replace(run, strategy=replace(strategy, accumulate=more))
    if strategy.accumulate > 1 and strategy.accumulate_dtype == "float32":
        changed_strategy = replace(strategy, accumulate_dtype="bfloat16")
        yield "--accumulate-dtype bfloat16", replace(run, strategy=changed_strategy)
    if strategy.offload == "none":
        yield "--offload optimizer", replace(run, strategy=replace(strategy, offload="optimizer"))
    if _is_unset(model, "loss_chunk") and (seq := getattr(model, "seq", None)):
        changed: Any = replace(model, loss_chunk=seq)
        yield f"--model.loss-chunk {seq}", replace(run, model=changed)
    named = run.optimizer
    if isinstance(named, Optimizer) and named.momentum_dtype == "float32" and named.name != "adafactor":
        optimizer = replace(named, momentum_dtype="bfloat16")
        yield "--optimizer.momentum-dtype bfloat16", replace(run, optimizer=optimizer)


def _is_unset(model: Any, name: str) -> bool:
    return is_dataclass(model) and getattr(model, name, 0) is None
