"""`shardtrain plan --compile KIND`: compile the best layout and compare it with its prediction."""

import math
from collections.abc import Sequence
from dataclasses import replace

from shardtrain import axes
from shardtrain.islands.cluster import Cluster
from shardtrain.plan.compile import Figures, describe_devices
from shardtrain.plan.device_calls import counts_flash
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.predict import predict, steps
from shardtrain.plan.prediction import Step
from shardtrain.plan.subject import Subject
from shardtrain.report.plan_compiled import flag_parameters, format_compiled
from shardtrain.sharding.specs import sharding_rows
from shardtrain.train_step.placement import state_specs
from shardtrain.trainer.config import Run
from shardtrain.trainer.planned import compile_figures, make_planned_strategy

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


def compile_plan(run: Run, plan: ClusterPlan, subjects: Sequence[Subject], kind: str) -> str:
    """Compile the best layout of each kind of islands, and format a comparison with its prediction.

    Args:
      run: the run.
      plan: the plan; kinds on which nothing runs are skipped.
      subjects: the subject of each kind, as for `plan_cluster`.
      kind: kind of devices, see `plan.compile.describe_devices`.
    """
    texts = []
    for each, counted in plan.planned(subjects):
        if not each.plan.ranked:
            continue
        devices = each.kind.devices or 1
        subject = replace(counted, target=counted.target._replace(has_flash=False))
        (step,) = steps(subject, each.machine, devices, [each.plan.ranked[0].choice])
        # the strategy that --output writes, as an island of this kind has it
        best = replace(plan, kinds=(each,), shares=plan.shares[:1])
        strategy = replace(make_planned_strategy(run, best), islands={})
        dtype = each.kind.strategy.get("compute_dtype", strategy.compute_dtype)
        own = replace(run, strategy=replace(strategy, compute_dtype=dtype))
        rows = round(step.batch_bytes / subject.row_bytes)
        found = compile_figures(own, kind, step.sizes, rows)
        predicted = predict(step, each.machine)
        title = f"{each.kind.kind}: the best way, compiled for {devices} x {kind}"
        texts.append("\n" + format_compiled(found, step, predicted, title=title, simulated=kind == "cpu"))
        if step.sizes[axes.PIPELINE] > 1:
            texts.append(EVERY_TICK)
        exchange = counted.exchange(step.choice.layout, step.sizes)
        if counts_flash(counted.program(step.choice.remat, exchange=exchange)):
            texts.append(ABSENT_ATTENTION)
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
