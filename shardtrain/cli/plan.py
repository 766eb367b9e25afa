"""`shardtrain plan RUN`: rank the layouts of a run on a machine by predicted step time and memory."""

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from shardtrain import axes
from shardtrain.cli.compilation import cache_programs, set_xla_flags
from shardtrain.cli.plan_options import CLUSTER_HEADER, PlanOptions, check_output, check_trace, cluster_path
from shardtrain.cli.run_file import read_given_cluster, read_given_strategy
from shardtrain.cli.run_options import parse_run
from shardtrain.errors.exit_codes import DONE, FAILED
from shardtrain.islands.cluster import Cluster, arrange_islands, cluster_text
from shardtrain.plan.batch_size import BatchSizes
from shardtrain.plan.compile import Figures, describe_devices
from shardtrain.plan.device_calls import counts_flash
from shardtrain.plan.island_stages import IslandPipelines, StagesPlan
from shardtrain.plan.islands import ClusterPlan, ReplicaPlanner, estimate_times
from shardtrain.plan.operators.search import plan_operators
from shardtrain.plan.pools import Pool, plan_pools
from shardtrain.plan.predict import predict, steps, sum_sent_by_axes
from shardtrain.plan.prediction import Step
from shardtrain.plan.search import find_frontier
from shardtrain.plan.simulator.step_graph import make_step_graph
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject
from shardtrain.report.operators import operators_text
from shardtrain.report.plan import explain_plan, plan_text
from shardtrain.report.plan_advice import plan_advice_text
from shardtrain.report.plan_compiled import flag_parameters, format_compiled
from shardtrain.report.plan_islands import explain_join
from shardtrain.report.plan_pools import pools_text
from shardtrain.report.plots.frontier import check_frontier, plot_frontier
from shardtrain.report.step_trace import TracedStep, format_traces, trace_text
from shardtrain.sharding.axis_sizes import parse_mesh
from shardtrain.sharding.specs import sharding_rows
from shardtrain.system import terminal
from shardtrain.system.atomic_write import replace_file
from shardtrain.train_step.placement import state_specs
from shardtrain.trainer.combinations import different_cut_problems, find_refused
from shardtrain.trainer.config import Run
from shardtrain.trainer.planned import (
    apply_shares,
    find_choices,
    make_operator_choice,
    make_planned_strategy,
    make_space,
    make_staged_strategy,
    make_subjects,
)
from shardtrain.trainer.run_step import compile_figures
from shardtrain.trainer.strategy import strategy_text


def _write_trace(run: Run, path: Path, plan: ClusterPlan, *, given: bool) -> str:
    """Write a trace of simulated steps of all kinds of islands; return the times of these steps.

    They are of the best layout, or of the run's own strategy if one is given.
    """
    choices = None
    if given:
        choices = find_choices(run.strategy, plan)
        plan = apply_shares(plan, run.strategy, choices)
    elif not all(each.plan.ranked for each in plan.kinds):
        return "trace: not written, as nothing runs\n"
    kinds = [each for each in plan.kinds if each.rows]
    found = [
        TracedStep(f"{each.kind.kind}: {what}", make_step_graph(times, overlap=overlap))
        for each, times in zip(kinds, estimate_times(plan, choices), strict=True)
        for overlap, what in ((False, "nothing overlaps"), (True, "sums of gradients overlap"))
    ]
    replace_file(path, trace_text(found).encode())
    return format_traces(found) + f"trace: {path}\n"


def _add_operators(run: Run, space: Space, plan: ClusterPlan) -> tuple[ClusterPlan, str]:
    """Return the plan with the best shardings of operators among its choices; and a text about them."""
    (kind,) = plan.kinds
    if not kind.plan.ranked:
        return plan, ""
    try:
        found = plan_operators(
            kind.subject,
            kind.machine,
            kind.kind.devices or 1,
            space=space,
            best=kind.plan.ranked[0],
        )
        chosen = found.best and make_operator_choice(run, kind.subject.batch, found.best)
    except ValueError as problem:
        return plan, f"operators: {problem}\n"
    ranked = list(kind.plan.ranked)
    if chosen is not None:
        insort(ranked, chosen, key=lambda each: each.order)
    kind = replace(kind, plan=replace(kind.plan, ranked=tuple(ranked)))
    return replace(plan, kinds=(kind,)), operators_text(found)


def _make_pipelines(run: Run, planner: ReplicaPlanner) -> IslandPipelines | str:
    """Return what plans pipelines over islands, or why the run cannot have them."""
    waves = run.strategy.synchronisation.distance is not None
    if not (run.strategy.synchronisation.is_mean or waves):
        return "only a mean of gradients in every step, and waves, are planned"
    own = [each.kind for each in planner.cluster.islands if each.strategy]
    problems = find_refused(run, "stages")
    if own:
        problems.append(f"kind {', '.join(own)} has a strategy of its own, and stages have one in common")
    sizes = planner.space.layout.mesh.items()
    if fixed := [f"{axis}={size}" for axis, size in sizes if axis != axes.DATA and size > 1]:
        problems.append(f"--fixed has {','.join(fixed)}, and devices of a stage split only examples")
    try:
        # the run refuses fields that do not go with stages
        across = replace(run.strategy.across, axis="pipeline", partitions=None, shares=None)
        replace(run, strategy=replace(run.strategy, across=across, islands={}))
    except ValueError as problem:
        problems.append(str(problem))
    if problems:
        return "; ".join(problems)
    state = planner.subjects[0].model_state
    one_cut = bool(different_cut_problems(run, state))
    return IslandPipelines(planner, one_cut=one_cut, unflushed=waves and not jax.tree.leaves(state))


def _write_pool(run: Run, path: Path, cluster: Cluster, pool: Pool) -> str:
    """Write the strategy of the best way to use islands; of several, also a cluster file with those used."""
    if not pool.fits:
        return f"strategy: {path} is not written, as nothing fits\n"
    way = pool.best
    is_staged = isinstance(way, StagesPlan)
    strategy = make_staged_strategy(run, way) if is_staged else make_planned_strategy(run, way)
    replace_file(path, strategy_text(strategy).encode())
    text = f"strategy: {path}\n"
    if len(cluster.of_islands) == 1:
        return text
    file = cluster_path(path)
    replace_file(file, (CLUSTER_HEADER + cluster_text(arrange_islands(cluster, pool.order))).encode())
    names = ", ".join(cluster.islands[kind].kind for kind in pool.order)
    return text + f"cluster: {file}, with islands in this order: {names}\n"


def _draw_frontiers(path: Path, plan: ClusterPlan, space: Space) -> str:
    """Draw memory against time for each kind of islands, each in a file; return a line for each file."""
    lines = []
    for each in plan.kinds:
        devices = each.kind.devices or 1
        if not each.plan.ranked:
            continue
        best, points = find_frontier(each.subject, each.machine, devices, space)
        file = path.with_stem(f"{path.stem}_{each.kind.kind}") if len(plan.kinds) > 1 else path
        title = f"{each.kind.kind}: {devices} device{'s' * (devices > 1)}, {each.rows} rows"
        plot_frontier(best, points, each.machine.rates.memory_bytes, file, title=title)
        lines.append(f"frontier: {file}, {len(best)} ways\n")
    return "".join(lines)


ABSENT_ATTENTION = (
    "its attention is XLA's, compiled and predicted: jax traces cuDNN's only where such a GPU is; a run there"
    " takes that in 16 bits and keeps less memory, as the plan above counts\n"
)

EVERY_TICK = (
    "in a pipeline the compiled flops count the dearest task of every tick, also where a stage waits\n"
)


def check_compile(kind: str, cluster: Cluster) -> None:
    """Refuse devices that cannot be compiled for.

    Raises:
      ValueError: an unknown kind, an unavailable number of devices, or an extra is not installed.
    """
    for each in cluster.islands:
        try:
            describe_devices(kind, each.devices or 1)
        except ImportError as error:
            raise ValueError(str(error)) from error


def compile_plan(run: Run, plan: ClusterPlan, kind: str) -> str:
    """Compile the best layout of each kind of islands, and format a comparison with its prediction.

    Args:
      run: the run.
      plan: the plan; kinds on which nothing runs are skipped.
      kind: kind of devices, see `plan.compile.describe_devices`.
    """
    texts = []
    for each in plan.kinds:
        if not each.plan.ranked:
            continue
        devices, counted = each.kind.devices or 1, each.subject
        subject = replace(counted, target=counted.target._replace(has_flash=False))
        chosen = each.plan.ranked[0]
        by_rules = replace(chosen.choice, layout=replace(chosen.choice.layout, operators={}))
        (step,) = steps(subject, each.machine, devices, [by_rules])
        # the strategy that --output writes for an island of this kind alone
        best = replace(plan, kinds=(each,), shares=plan.shares[:1])
        own = replace(run, strategy=make_planned_strategy(run, best))
        rows = round(step.batch_bytes / subject.row_bytes)
        found = compile_figures(own, kind, step.sizes, rows)
        predicted, sent = predict(step, each.machine), sum_sent_by_axes(step, simulated=kind == "cpu")
        if chosen.change is not None:
            predicted, sent = chosen.change.predict(predicted), chosen.change.predict_sent(sent)
        title = f"{each.kind.kind}: the best way, compiled for {devices} x {kind}"
        texts.append("\n" + format_compiled(found, predicted, title=title, sent_bytes=sent))
        if step.sizes[axes.PIPELINE] > 1:
            texts.append(EVERY_TICK)
        exchange = counted.exchange(step.choice.layout, step.sizes)
        if counts_flash(counted.program(step.choice.remat, exchange=exchange)):
            texts.append(ABSENT_ATTENTION)
        if chosen.change is None:
            texts += [f"{line}\n" for line in _list_flags(subject, step, found)]
    return "".join(texts)


def _list_flags(subject: Subject, step: Step, found: Figures) -> Sequence[str]:
    """Return a line for each parameter that is not sharded or gathered as planned."""
    layout = step.choice.layout
    stages = subject.stages(step.sizes[axes.PIPELINE], step.choice.virtual_stages)
    specs = state_specs(subject.find_model(None), subject.optimizer, layout, step.sizes, stages=stages)
    rows = sharding_rows(specs.arrays, specs.abstract.params, specs.params, step.sizes)
    if step.sizes[axes.FSDP] * step.sizes[axes.TENSOR] == 1:
        # data and pipeline split nothing outside the blocks, as the plan says
        return []
    return list(flag_parameters(rows, found, layout.zero, math.prod(step.sizes.values())))


def _make_subjects(
    run: Run, options: PlanOptions, cluster: Cluster, space: Space
) -> tuple[Run, Sequence[Subject]]:
    """Return the run with its batch, which --batch may choose, and the subject of each kind of islands."""

    def plan(subjects: Sequence[Subject], space: Space) -> Pool:
        planner = ReplicaPlanner(subjects, cluster, space, 1, strategy.synchronisation, strategy.across)
        return plan_pools(planner, _make_pipelines(run, planner)).pool

    accumulate, strategy = run.strategy.accumulate, run.strategy
    if isinstance(options.batch, int):
        run = replace(run, batch=options.batch)
    with TemporaryDirectory() as folder:
        source = run.data.train(Path(folder))
        subjects = make_subjects(run, source, cluster.islands)
        if not isinstance(options.batch, str):
            return run, subjects
        sizes = BatchSizes(
            plan=plan,
            subjects=subjects,
            space=space,
            accumulate=accumulate,
            multiple=accumulate * sum(each.devices or 1 for each in cluster.of_islands),
            most=len(source),
        )
        found = sizes.find(options.batch)
        terminal.out(
            f"batch {found.rows}: {found.reason}; shardtrain train takes it as --batch {found.rows}\n"
        )
        run = replace(run, batch=found.rows)
        return run, make_subjects(run, source, cluster.islands)


def main(arguments: Sequence[str]) -> int:
    """Print the ranked layouts, and write what options ask for; return 0, or 1 if nothing fits."""
    flags_text = set_xla_flags(arguments)
    run, options = parse_run("plan", arguments, PlanOptions)
    cluster = options.cluster(read_given_cluster(arguments))
    if options.output is not None:
        check_output(options.output, several=len(cluster.of_islands) > 1)
    if options.trace is not None:
        check_trace(options.trace)
    if options.frontier is not None:
        check_frontier(options.frontier)
    if options.compile is not None:
        check_compile(options.compile, cluster)
    space = make_space(run, parse_mesh(options.fixed))
    run, subjects = _make_subjects(run, options, cluster, space)
    synchronisation = run.strategy.synchronisation
    planner = ReplicaPlanner(subjects, cluster, space, options.most, synchronisation, run.strategy.across)
    pools = plan_pools(planner, _make_pipelines(run, planner))
    plan = pools.pool.replicas
    if len(plan.shares) == 1 and synchronisation.on_deltas:
        terminal.out(
            "synchronisation: a plan of one island adds up gradients over data in every step, as does its"
            " strategy; --synchronisation is ignored\n"
        )
    pool, about_operators = pools.pool, ""
    try:
        if options.operators:
            ranked, about_operators = _add_operators(run, space, plan)
            pool = replace(pool, replicas=ranked)
    finally:
        # a search that fails leaves the plan of layouts
        text = plan_text(pool.replicas, options.most) + pools_text(pools, cluster.islands)
        terminal.out(text + about_operators)
        if options.output is not None:
            terminal.out(_write_pool(run, options.output, cluster, pool))
    if options.explain:
        for each in (one for one in pool.replicas.kinds if one.plan.ranked and one.rows):
            terminal.out(f"\n{each.kind.kind}\n" + explain_plan(each.plan.ranked[0]))
        terminal.out(explain_join(plan) if plan.fits else "")
    if options.frontier is not None:
        terminal.out(_draw_frontiers(options.frontier, plan, space))
    if options.advise:
        try:
            terminal.out(plan_advice_text(plan))
        except ValueError as problem:  # the plan itself remains valid
            terminal.out(f"advise: {problem}\n")
    if options.trace is not None:
        given = read_given_strategy(arguments) is not None
        traced = planner.plan_all() if given else plan
        terminal.out(_write_trace(run, options.trace, traced, given=given))
    if options.compile is not None:
        with cache_programs(flags_text):
            terminal.out(compile_plan(run, pool.replicas, options.compile))
    return DONE if pool.fits else FAILED
