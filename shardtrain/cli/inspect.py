"""`shardtrain inspect RUN`: show how a run is sharded over a mesh, and what devices send, without devices."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from shardtrain import axes
from shardtrain.cli.arguments import find_values
from shardtrain.cli.compilation import CompileOptions, cache_programs, set_xla_flags
from shardtrain.cli.run_options import parse_run
from shardtrain.data import RowSplit
from shardtrain.errors.messages import refuse
from shardtrain.functional.activation_rules import noting
from shardtrain.functional.model import Model
from shardtrain.optim.optimizer import make_optimizer
from shardtrain.pipeline.partition import counts, parse_cuts
from shardtrain.pipeline.schedule import make_table, read_table
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.table import Table
from shardtrain.plan.compile import Figures
from shardtrain.plan.island_exchange import island_merges, mesh_merges
from shardtrain.plan.traffic import StepSizes, parameter_traffic, weights
from shardtrain.report.islands import parts_text
from shardtrain.report.plots.timeline import plot_timeline
from shardtrain.report.sharding import sharding_text
from shardtrain.report.timeline import timeline_text
from shardtrain.report.traffic import figures_text, memory_text, synchronisation_text, traffic_text
from shardtrain.sharding.axis_sizes import MOST_DEVICES, axis_sizes
from shardtrain.system import terminal
from shardtrain.train_step.placement import Specs, state_specs
from shardtrain.train_step.placement_checks import check_stages
from shardtrain.train_step.stage_links import PipelineGrid
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.layout_check import check_sequences
from shardtrain.trainer.run_step import (
    compile_figures,
    format_inspected_cut,
    list_memory_changes,
    plan_sent_parts,
)
from shardtrain.trainer.setup import find_unused, format_unused, make_microbatch
from shardtrain.trainer.stage_cut import format_predicted_cut
from shardtrain.trainer.strategy import Strategy

MOST = {"devices": MOST_DEVICES, "pipeline_stages": 1024, "microbatches": 8192}
"""Largest values of options: no machine has more devices, and larger schedules take hours to draw."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions(CompileOptions):
    """Options of inspect.

    Args:
      devices: number of devices. By default, the product of --mesh, or the devices of this machine.
      unused: list the parameters that the loss does not depend on; this prepares the data of the run.
      compile: compile the step for these devices, and show the bytes that it sends and the memory that it
        needs: cpu (with --cpu-devices), h100 or a100, which this machine need not have.
      memory: with --compile, also compile the step with each option that may save memory (remat policies,
        more microbatches, logits in chunks, momentum in bfloat16), and show what each needs.
      pipeline_stages: number of stages in the timeline, and of islands for --stages time. By default, the
        size of the mesh axis `pipeline`, or 4.
      microbatches: number of microbatches in the timeline. By default, the number of --accumulate.
      lockstep: draw the schedule of a mesh, in which every tick waits for all stages, instead of the schedule
        of islands. By default, it is if the mesh has the axis `pipeline`.
      timeline: also write the timeline as a picture to this .svg or .png file.
      island: number of an island; show the run with the sections of the strategy that apply to this island,
        or to the devices of --compile. None applies no sections.
      islands: number of islands, for the bytes that each sends. By default, the number of weights in
        --shares, else the number of replicas of a mesh that merges deltas or uses a combiner, else 2.
    """

    devices: int | None = None
    unused: bool = False
    compile: str | None = None
    memory: bool = False
    pipeline_stages: int | None = None
    microbatches: int | None = None
    lockstep: bool | None = None
    timeline: Path | None = None
    island: int | None = None
    islands: int | None = None

    def check(self) -> None:
        """Refuse options that are out of range, all at once."""
        counts = ("devices", "pipeline_stages", "microbatches")
        given = {name: number for name in counts if (number := getattr(self, name)) is not None}
        wrong = [
            f"--{name.replace('_', '-')} is {number}; use 1 to {MOST[name]}"
            for name, number in given.items()
            if not 1 <= number <= MOST[name]
        ]
        if self.island is not None and self.island < 0:
            wrong.append(f"--island is {self.island}; islands are numbered from 0")
        if self.islands is not None and self.islands < 2:
            wrong.append(f"--islands is {self.islands}; one island sends nothing, use 2 or more")
        if self.memory and self.compile is None:
            wrong.append("--memory shows figures of a compiler; add --compile cpu, or another kind of device")
        refuse("this cannot be shown", wrong)


def main(arguments: Sequence[str]) -> int:
    """Print the sharding, the traffic and, if asked for, the schedule and the compiled step; return 0."""
    flags_text = set_xla_flags(arguments)
    run, options = parse_run("inspect", arguments, InspectOptions)
    options.check()
    if options.island is not None:
        strategy = run.strategy.select_island(options.island, options.compile or "")
        run = replace(run, strategy=strategy)
    elif run.strategy.islands:
        names = ", ".join(map(repr, run.strategy.islands))
        terminal.out(f"sections of islands ({names}) are not applied; --island NUMBER applies those of one\n")
    layout = run.strategy.layout
    named = layout.mesh.values()
    # counting devices starts jax's backend
    devices = options.devices or (jax.device_count() if -1 in named else math.prod(named))
    sizes = axis_sizes(layout.mesh, devices)
    model = make_model(run)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims, frozen=model.frozen)
    stages = _find_partition(run, model, sizes[axes.PIPELINE])
    if stages is not None:
        check_stages(model, layout, sizes, run.strategy.synchronisation, stages)
    specs = state_specs(model, optimizer, layout, sizes, run.strategy.synchronisation, stages)
    terminal.out(sharding_text(specs, sizes, run.strategy.offload) + "\n")
    work = StepSizes(
        weights=weights(specs.arrays, layout.sharded_rules), microbatches=run.strategy.accumulate
    )
    traffic = parameter_traffic(work, layout.zero, sizes)
    num_islands = _count_islands(run, options, sizes)
    if num_islands == 1 and not run.strategy.synchronisation.is_mean:
        # the replicas of `data` exchange what their combiner sends, which is shown below
        traffic = {key: sent for key, sent in traffic.items() if axes.DATA not in key.axes}
    terminal.out(traffic_text(traffic))
    terminal.out(_merges_text(run, specs, sizes, num_islands) + "\n")
    of_timeline = (options.pipeline_stages, options.microbatches, options.lockstep, options.timeline)
    asked = any(each is not None for each in of_timeline) or find_values(arguments, "--schedule")
    if asked or sizes[axes.PIPELINE] > 1:
        _show(_make_table(run.strategy, options, sizes[axes.PIPELINE]), options.timeline)
    if run.batch_unit == "examples":
        RowSplit.of(sizes, layout.batch_axes, run.strategy.accumulate).check(run.batch)
    # the cut into stages that islands would make by time or by tracing
    by_time = run.strategy.pipeline.stages == "time"
    if run.strategy.across.axis == "pipeline" and (by_time or model.chain is None):
        form = format_predicted_cut if by_time else format_inspected_cut
        text = _use_data(run, lambda source: form(run, source, options.pipeline_stages))
        terminal.out(f"\n{text}\n")
    if sizes[axes.CONTEXT] > 1 or layout.collective_matmul:
        check_sequences(run, model, sizes, _use_data(run, partial(make_microbatch, run)))
    if options.unused:
        found = find_unused(run, model, _use_data(run, partial(make_microbatch, run)))
        text = format_unused(found, run.optimizer) if found else "every parameter can change the loss"
        terminal.out(f"{text}\n")
    if options.compile is not None:
        with cache_programs(flags_text):
            terminal.out("\n" + _compile(run, options, sizes))
    return 0


def _count_islands(run: Run, options: InspectOptions, sizes: Mapping[str, int]) -> int:
    """Return the number of islands; 1 means that the replicas are the ones of the mesh.

    Raises:
      ValueError: it differs from the number of shares, or does not divide into whole pipelines.
    """
    across, given = run.strategy.across, options.islands
    is_pipeline, of_pipeline = across.axis == "pipeline", across.partitions or 1
    if isinstance(across.shares, tuple) and len(across.shares) > 1:
        by_shares = len(across.shares) * of_pipeline
        if given not in (None, by_shares):
            raise ValueError(
                f"--islands is {given}, and the shares are for {by_shares} islands; give --islands"
                f" {by_shares}, or other --shares"
            )
        return by_shares
    if given is not None:
        if is_pipeline and across.partitions:
            PipelineGrid(num_islands=given, num_stages=across.partitions, island=0)
        return given
    if is_pipeline:
        return 2 * of_pipeline
    return 1 if sizes[axes.DATA] > 1 and not run.strategy.synchronisation.is_mean else 2


def _merges_text(run: Run, specs: Specs, sizes: Mapping[str, int], num_islands: int) -> str:
    """Format what replicas send to each other: islands, pipelines of islands, or the replicas of the mesh."""
    synchronisation, across = run.strategy.synchronisation, run.strategy.across
    if num_islands == 1:
        return synchronisation_text(synchronisation, mesh_merges(synchronisation, specs, sizes), "mesh")
    if across.axis == "pipeline":
        num_pipelines = num_islands // (across.partitions or num_islands)
        if num_pipelines < 2:
            return "replicas: one pipeline of islands, which is merged with no other"
        merges = island_merges(synchronisation, specs, num_pipelines, across)
        return synchronisation_text(synchronisation, merges, "pipelines")
    merges = island_merges(synchronisation, specs, num_islands, across)
    text = synchronisation_text(synchronisation, merges)
    if across.num_gradient_programs == 1:
        return text
    sent = _use_data(run, lambda source: plan_sent_parts(run, source, sizes))
    return f"{text}\n{parts_text(sent.sizes_bytes, across.num_gradient_programs)}"


def _use_data(run: Run, use: Callable[[Any], Any]) -> Any:
    """Prepare the training data of a run in a temporary folder, and call a function with it."""
    with TemporaryDirectory() as folder:
        return use(run.data.train(Path(folder)))


def _compile(run: Run, options: InspectOptions, sizes: Mapping[str, int]) -> str:
    """Compile the step and describe it; with --memory, also the memory of other options."""
    kind, notes = options.compile or "", []
    with noting(notes.append):
        found = compile_figures(run, kind, sizes)
    text = "".join(f"{note}\n" for note in notes) + figures_text(found, kind)
    if not options.memory:
        return text
    rows: list[tuple[str, Figures | str]] = []
    for option, changed in list_memory_changes(run):
        try:
            rows.append((option, compile_figures(changed, kind, sizes)))
        except ValueError as error:
            rows.append((option, str(error).splitlines()[0]))
    return f"{text}\n{memory_text(found, rows)}"


def _find_partition(run: Run, model: Model, num_stages: int) -> Partition | None:
    """Return the partition of the blocks into stages; an equal one if it depends on shapes of the data."""
    if num_stages == 1 or model.chain is None or not model.chain.stacked:
        return None
    pipeline = run.strategy.pipeline
    by = parse_cuts(pipeline.stages)[0]
    if by in ("params", "flops"):
        terminal.err(f"the blocks are shown split evenly: splitting them by {by} needs the data\n")
        by = "equal"
    found = counts(by, model.chain.num_blocks, num_stages * pipeline.virtual_stages)
    return Partition(
        num_stages=num_stages,
        num_chunks=pipeline.virtual_stages,
        placement=pipeline.placement,
        counts=tuple(found),
    )


def _make_table(strategy: Strategy, options: InspectOptions, num_stages: int) -> Table:
    """Return the schedule to draw; an example with 4 stages if the mesh has no pipeline."""
    schedule, chunks = strategy.pipeline.schedule, strategy.pipeline.virtual_stages
    lockstep = num_stages > 1 if options.lockstep is None else options.lockstep
    sizes = (num_stages, strategy.accumulate, chunks)
    if num_stages == 1 and schedule.endswith(".csv"):
        found = read_table(schedule, lockstep=lockstep)
        sizes = (found.num_stages, found.num_microbatches, found.num_chunks)
    elif num_stages == 1:
        sizes = (4, strategy.accumulate, chunks)
    stages, microbatches = options.pipeline_stages or sizes[0], options.microbatches or sizes[1]
    return make_table(schedule, stages, microbatches, sizes[2], lockstep=lockstep)


def _show(table: Table, picture: Path | None) -> None:
    """Print the timeline of a schedule; at full width if the output is no terminal."""
    width, _ = shutil.get_terminal_size(fallback=(1_000_000, 24))
    terminal.out("\n" + timeline_text(table, width))
    if picture is not None:
        terminal.out(f"timeline: {plot_timeline(table, picture)}\n")
