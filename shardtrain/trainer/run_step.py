"""Make the step of several islands or stages, compare its programs, and compile it for other devices.

It also formats the cut of a pipeline. Next: `train_step/sync/island_step.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shardtrain.axes import CONTEXT, PIPELINE, TENSOR
from shardtrain.data import Loader, RowSplit
from shardtrain.errors.messages import refuse
from shardtrain.functional.loss import Batch
from shardtrain.functional.remat_policies import REMAT_POLICIES
from shardtrain.islands.agreement import program_fact
from shardtrain.optim.optimizer import Optimizer
from shardtrain.pipeline.cuts import make_partitions
from shardtrain.pipeline.in_flight import format_in_flight
from shardtrain.pipeline.schedule import forward_only, make_table
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.pipeline.traced_cut import ModelTrace
from shardtrain.plan.compile import Figures, compile_step, describe_devices
from shardtrain.plan.compile import figures as read_figures
from shardtrain.plan.hlo.rendezvous import permutes_in_branches
from shardtrain.report.islands import buckets_text, parts_text
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text
from shardtrain.report.timeline import figures, heading, simulate_units
from shardtrain.sharding.mesh import abstract_mesh, make_mesh
from shardtrain.system.program_cache import find_program_folder
from shardtrain.train_step.elastic_exchange import split_codec
from shardtrain.train_step.gradient_pieces import PartPlan
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_combiner import Channel
from shardtrain.train_step.island_compute import IslandCompute, Training
from shardtrain.train_step.island_gradients import plan_parts
from shardtrain.train_step.stage_compute import StageCompute, StageTables
from shardtrain.train_step.stage_links import StageLinks
from shardtrain.train_step.stage_programs import StageUpdate
from shardtrain.train_step.sync.island_step import IslandStep
from shardtrain.train_step.sync.local_steps import make_sync
from shardtrain.trainer.config import Run, describe, make_model
from shardtrain.trainer.coordination import LONG_SECONDS, Coordination
from shardtrain.trainer.setup import RunSetup, make_microbatch, make_setup
from shardtrain.trainer.waves import WaveLog, make_waves

if TYPE_CHECKING:
    from shardtrain.trainer.prepared_run import PreparedRun  # which imports this module


def check_programs(prepared: "PreparedRun", batch: Any) -> None:
    """Check the programs of the step of a run; it uses the same ones when it is called.

    Raises:
      ValueError: islands of the same mesh and rows have different programs; or a loss, a metric or a model
        cuts positions out of a sharded sequence in a pipeline.
    """
    run, setup, coordination = prepared.run, prepared.setup, prepared.coordination
    sizes = setup.mesh.shape
    over_tensor = run.strategy.layout.sequence_sharded and sizes[TENSOR] > 1
    # a pipeline over sharded sequences
    in_stages = sizes[PIPELINE] > 1 and (sizes[CONTEXT] > 1 or over_tensor)
    if not (in_stages or coordination.islands):
        return
    step: Any = prepared.step
    of_islands, given = isinstance(step, IslandStep), (prepared.wanted, batch)
    programs = step.compute.lowered(*given) if of_islands else [step.lower(*given)]
    if not programs:
        return
    if in_stages:
        refuse(
            "a pipeline over sharded sequences in one mesh needs a program whose stages send no parts of them"
            " by permutes, and this one does. Where a loss, metric or model shifts positions of what the"
            " model computes, as in logits[:, 1:], use whole sequences, by"
            " flax.linen.with_logical_constraint(x, ('batch', None, 'vocab')), or positions of the batch; or"
            " use --across pipeline, or context=1 and no --sequence-sharded",
            permutes_in_branches(programs[0].compile().as_text() or ""),
        )
    if coordination.islands is not None:
        coordination.check_agreement(hash_programs(run, setup, batch, programs))


def hash_programs(
    run: Run, setup: RunSetup, batch: Any, programs: Sequence[jax.stages.Lowered]
) -> dict[str, str]:
    """Return the hash of the programs of a step, equal on islands of the same mesh and rows."""
    return program_fact(
        "\n".join(program.as_text() for program in programs),
        mesh=dict(setup.mesh.shape),
        batch=str(jax.tree.map(jnp.shape, batch)),
        layout=str(describe(run.strategy.layout)),
        compute_dtype=str(run.strategy.compute_dtype),
        remat=str(run.strategy.remat),
        kind=jax.devices()[0].device_kind,
        processes=jax.process_count(),
    )


def pipeline_text(run: Run, setup: RunSetup) -> str | None:
    """Format the partition of a pipeline and the figures of its schedule; None without a pipeline."""
    stages = setup.placement.stages if setup.stage_model is None else setup.stage_model.stages
    if stages is None:
        return None
    pipeline, microbatches = run.strategy.pipeline, count_slot_microbatches(run)
    sizes = (stages.num_stages, microbatches, stages.num_chunks)
    table = make_table(pipeline.schedule, *sizes, lockstep=setup.stage_model is None)
    found = figures(table, simulate_units(table))
    text = f"{heading(table)}; blocks {_cuts_text(setup, stages)}\n{found}"
    if pipeline.in_flight > 1:
        text = (
            f"blocks {_cuts_text(setup, stages)}; {format_in_flight(stages.num_stages, pipeline.in_flight)}"
        )
    if setup.stage_model is not None and isinstance(setup.stage_model.traced, ModelTrace):
        text = f"{format_traced_cut(setup.stage_model.traced, stages)}{text}"
    if len(set(setup.cuts)) > 1:
        text += (
            "\nfaulty devices are looked for only among pipelines of the same cut: programs for other numbers"
            " of blocks may round differently"
        )
    return text


def _cuts_text(setup: RunSetup, stages: Partition) -> str:
    """Format the blocks of each part; of each pipeline where they are cut differently."""
    cuts = dict.fromkeys(setup.cuts or [stages])
    return "; ".join(",".join(map(str, cut.counts)) for cut in (cuts if len(cuts) == 1 else setup.cuts))


def bridge_text(prepared: "PreparedRun") -> str | None:
    """Format the number and sizes of the buckets that islands send; None if nothing is sent."""
    coordination, step = prepared.coordination, prepared.island_step
    num_parts = prepared.run.strategy.across.num_gradient_programs
    grid, transfer = coordination.grid, coordination.transfer
    if transfer is None or (grid is not None and grid.num_replicas == 1):
        return None
    sizes_bytes = [size for each in coordination.transfers for size in each.bucket_times.sizes_bytes]
    if not sizes_bytes:
        return None
    text = buckets_text(sizes_bytes)
    if num_parts == 1 or step is None or not isinstance(step.compute, IslandCompute):
        return text
    part_bytes = [each.num_bytes for each in step.compute.exchange.combiners]
    return f"{text}\n{parts_text(part_bytes, num_parts)}"


def make_multi_island_step(
    prepared: "PreparedRun", loader: Loader, batch: Batch, wave_log: WaveLog
) -> IslandStep | None:
    """Make the step of several islands, replicas or stages; None for a run of one island.

    Args:
      prepared: the run, whose step this makes.
      loader: the loader of this island's rows.
      batch: the first batch of this island, on its mesh.
      wave_log: records the events of waves.

    Raises:
      ValueError: the run has waves, and islands have several processes.
    """
    run, setup, coordination = prepared.run, prepared.setup, prepared.coordination
    if coordination.transfer is None:
        return None
    synchronisation, across = run.strategy.synchronisation, run.strategy.across
    if run.elastic.islands:
        _, synchronisation = split_codec(synchronisation)
    if setup.stage_model is not None:
        run = replace(run, strategy=replace(run.strategy, synchronisation=synchronisation))
        compute = _make_stage_compute(run, setup, setup.stage_model, coordination, loader)
    else:
        training = Training(setup.model, run.loss, setup.optimizer, setup.learning_rate)
        gather, num_programs = coordination.gather_after_work, across.num_gradient_programs
        channel = Channel(coordination.transfer, gather, across.reduce_dtype, num_programs)
        start_row = loader.shard().start
        compute = IslandCompute(training, setup.placement, channel, synchronisation, start_row, batch)
    if synchronisation.distance is not None:
        return make_waves(prepared, wave_log, compute)
    return make_sync(compute, synchronisation, run.steps)


def _make_stage_compute(
    run: Run, setup: RunSetup, stage_model: StageModel, coordination: Coordination, loader: Loader
) -> StageCompute:
    islands, grid, owners = coordination.islands, setup.grid, coordination.owners
    assert islands is not None
    assert grid is not None
    assert owners is not None
    microbatches, pipeline = run.strategy.accumulate, run.strategy.pipeline
    # a slot of an elastic run passes through the stages by itself
    sizes = (grid.num_stages, count_slot_microbatches(run), pipeline.virtual_stages)
    evaluation_sizes = (grid.num_stages, microbatches, pipeline.virtual_stages)
    # stages exchange shapes for this pipeline's rows, with padding
    rows = loader.shard().num_rows // microbatches
    shapes = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in stage_model.traced.batch.items()
    }
    # the step clips instead of the optimizer, because only the step knows the norm of all stages
    clip = run.optimizer.clip if isinstance(run.optimizer, Optimizer) else None
    # whether this stage can load programs that the same stage of the first pipeline compiled
    shares_programs = grid.replica > 0 and find_program_folder() is not None
    of_first = islands.hosts[islands.first_ranks[grid.stage]]
    shares_programs = shares_programs and of_first == islands.environment.host
    return StageCompute(
        stage_model,
        StageTables(
            stage_model.flow(shapes),
            # without a flush all microbatches of a batch pass through the stages together
            make_table(pipeline.schedule if pipeline.in_flight == 1 else "gpipe", *sizes),
            forward_only(*evaluation_sizes, placement=pipeline.placement),
        ),
        StageUpdate(setup.optimizer, clip, setup.learning_rate),
        setup.placement,
        StageLinks(
            grid,
            islands.mailbox(grid.replica, grid.stage, LONG_SECONDS),
            owners,
            lambda name, value: islands.control.all_gather(name, value, LONG_SECONDS),
            shares_programs,
        ),
        run.strategy.synchronisation,
        loader.shard().start,
    )


def count_slot_microbatches(run: Run) -> int:
    """Return the number of microbatches that pass through stages together: of a batch, or of a slot."""
    return max(run.strategy.accumulate // (run.elastic.slots or 1), 1)


def format_traced_cut(traced: ModelTrace, stages: Partition) -> str:
    """Format a table of the parts of a model that was cut by tracing.

    Args:
      traced: the model.
      stages: the cut.
    """
    sizes = {path: x.size for path, x in traced.own_params().items()}
    rows, seen = [], set[str]()
    for part, count in enumerate(stages.counts):
        reads = [path for path in sizes if path in traced.part_paths(stages, part)]
        own = [path for path in reads if path not in seen]
        borrowed = [path for path in reads if path in seen]
        seen.update(reads)
        rows.append(
            (
                str(part),
                str(count),
                f"{sum(sizes[path] for path in own):,}",
                ", ".join(dict.fromkeys(own[:1] + own[-1:])),
                ", ".join(borrowed),
                ", ".join(traced.format_sent(stages, part)),
                bytes_text(traced.bytes_behind(stages, part)),
            )
        )
    header = ("part", "pieces", "parameters", "first and last", "borrowed", "sent on", "a row")
    text = f"the model has no `blocks` and is cut by tracing into {sum(stages.counts)} pieces"
    return f"{text}\n{table_text(header, rows)}"


def format_inspected_cut(run: Run, source: Any, num_stages: int | None) -> str:
    """Format the cut of a run across islands.

    Args:
      run: a run of a pipeline across islands, whose model has no blocks.
      source: its samples.
      num_stages: number of stages; by default the partitions of the run, or 2.

    Raises:
      ValueError: the model cannot be cut like this.
    """
    traced = ModelTrace(make_model(run), run.loss, make_microbatch(run, source))
    num_stages = num_stages or run.strategy.across.partitions or 2
    cuts = make_partitions(traced, run.strategy.pipeline, num_stages, 1)
    return format_traced_cut(traced, cuts[0]).rstrip()


def plan_sent_parts(run: Run, source: Any, sizes: Mapping[str, int]) -> PartPlan:
    """Plan the gradient parts that an island sends after each program of `--gradient-parts`.

    Args:
      run: the run with the strategy of island 0, whose parts all islands send.
      source: its training samples, of which one is loaded.
      sizes: axis -> size of the mesh of an island.
    """
    rows = make_microbatch(run, source)
    # offloading needs devices, and changes no gradient
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
      run: the run with the strategy of one island.
      kind: the kind of devices, see `plan.compile.describe_devices`.
      sizes: axis -> size.
      num_rows: rows of this island, with padding; None means the whole batch.

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
        # rows of the first batch, with padding
        split = RowSplit.of(sizes, run.strategy.layout.batch_axes, accumulate)
        num_rows = split.pad_rows(len(rows["weights"]) * accumulate)
    batch = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in rows.items()}
    compiled = compile_step(
        parts.model, run.loss, parts.optimizer, parts.placement, batch, microbatches=accumulate
    )
    return read_figures(compiled, sizes)


def list_memory_changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield (option, run with that option) for each option that may save memory.

    Args:
      run: the run with the strategy of one island.
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
    is_whole = is_dataclass(model) and getattr(model, "loss_chunk", 0) is None
    if is_whole and (seq := getattr(model, "seq", None)):
        config: Any = model
        changed = replace(config, loss_chunk=seq)
        yield f"--model.loss-chunk {seq}", replace(run, model=changed)
    named = run.optimizer
    if isinstance(named, Optimizer) and named.momentum_dtype == "float32" and named.name != "adafactor":
        optimizer = replace(named, momentum_dtype="bfloat16")
        yield "--optimizer.momentum-dtype bfloat16", replace(run, optimizer=optimizer)
