"""Cut a pipeline across islands by time: describe the devices of its stages, and format the cut.

The numbers of blocks replace the word "time" in the run. Next: `pipeline/stage_cut.py`, `prepared_run.py`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.axes import DATA, FSDP, TENSOR
from shardtrain.errors.messages import refuse
from shardtrain.functional.float_gradients import value_and_grad
from shardtrain.functional.rng import new_key
from shardtrain.optim.optimizer import make_optimizer
from shardtrain.pipeline.block_costs import BACKWARD, model_costs
from shardtrain.pipeline.costs import ChainTrace
from shardtrain.pipeline.options import MEMORY, SPEEDS, Pipeline, parse_stage_numbers
from shardtrain.pipeline.partition import counts
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import StageCosts, StageDevices
from shardtrain.pipeline.stage_cut import StageCut, best_cut, fits
from shardtrain.plan.devices import GB, TERA, find_device
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.stage_links import PipelineGrid
from shardtrain.trainer.combinations import different_cut_problems
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.setup import make_microbatch


class StageIslandDevices(NamedTuple):
    """The devices of an island, as islands send them to each other.

    Args:
      kind: the kind of its devices.
      number: the number of devices.
      state_shards: number of devices over which parameters are sharded.
      row_shards: number of devices over which rows are sharded.
      flops_per_second: the measured speed of each device; None if it was not measured.
    """

    kind: str
    number: int
    state_shards: int
    row_shards: int
    flops_per_second: float | None = None


def apply_stage_cut(run: Run, source: Any, coordination: Coordination, output: RunConsole) -> Run:
    """Return the run with numbers of blocks if its pipeline across islands is to be cut by time.

    Args:
      run: the run.
      source: its samples.
      coordination: the exchange with the other islands.
      output: receives the table of the stages.

    Raises:
      ValueError: the options do not fit the number of stages, or no cut fits the memory.
    """
    strategy, num_islands = run.strategy, coordination.num_islands
    by_time = strategy.across.axis == "pipeline" and strategy.pipeline.stages == "time"
    if num_islands == 1 or not by_time:
        return run
    own = describe_island_devices(strategy.layout, jax.local_devices()[0].device_kind, jax.device_count())
    num_stages = strategy.across.partitions or num_islands
    grid = PipelineGrid(num_islands=num_islands, num_stages=num_stages, island=coordination.island)
    if strategy.pipeline.stage_speeds == "measured":
        # ranks of one host take turns, as they share it
        traced = trace(run, source, grid.num_replicas, own.row_shards)
        measured = coordination.run_in_turn("speeds of stages", lambda: flops_per_second(traced))
        own = own._replace(flops_per_second=measured)
    every = [StageIslandDevices(*each) for each in coordination.all_gather_islands("devices of stages", own)]
    replicas = [grid.select_replica(every, replica) for replica in range(grid.num_replicas)]
    text, cuts = _cut(run, source, replicas)
    output.note(text)
    return replace(run, strategy=replace(strategy, pipeline=replace(strategy.pipeline, stages=cuts)))


def _cut(run: Run, source: Any, replicas: Sequence[Sequence[StageIslandDevices]]) -> tuple[str, str]:
    """Return the text about the cuts of all replicas, and the cuts themselves.

    Args:
      run: the run.
      source: its samples.
      replicas: for each replica, the island of each stage.
    """
    model, pipeline = make_model(run), run.strategy.pipeline
    state = jax.eval_shape(model.init, new_key(0))[1]
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims, frozen=model.frozen)
    costs = model_costs(trace(run, source, len(replicas)), optimizer.init)
    owns = [_select_replica(pipeline, number, len(replicas)) for number in range(len(replicas))]
    pools, note = [(own, [replica]) for own, replica in zip(owns, replicas, strict=True)], ""
    if len(replicas) > 1 and (problems := different_cut_problems(run, state)):
        # one cut for all: each stage as the slowest of its islands
        pools = [(pipeline, replicas)]
        note = f"\nall pipelines have one cut, for the slowest of each stage: {'; '.join(problems)}"
    texts, cuts = [], []
    for own, pool in pools:
        stages, counted = find_stage_devices(own, pool)
        sizes = (len(stages), run.strategy.accumulate, pipeline.virtual_stages)
        all_costs = StageCosts(
            model=costs,
            devices=stages,
            table=make_table(pipeline.schedule, *sizes),
            link_bytes_per_second=math.inf if pipeline.link_speed is None else pipeline.link_speed * GB,
        )
        found = best_cut(all_costs)
        cuts.append(",".join(map(str, found.counts)))
        name = f"pipeline {len(cuts) - 1}:\n" if len(pools) > 1 else ""
        texts.append(f"{name}{cut_text(all_costs, found, counted)}")
    return "\n".join(texts) + note, ";".join(cuts if len(set(cuts)) > 1 else cuts[:1])


def _select_replica(pipeline: Pipeline, replica: int, num_replicas: int) -> Pipeline:
    """Return the options with the speeds and memories of one replica, where they are given for each."""
    found, problems = {}, []
    for name in ("stage_speeds", "stage_memory"):
        parts = getattr(pipeline, name).split(";")
        if len(parts) not in (1, num_replicas):
            problems.append(
                f"{name} is for {len(parts)} pipelines, and there {'are' if num_replicas > 1 else 'is'}"
                f" {num_replicas}; give one for all, or one each"
            )
        found[name] = parts[replica] if len(parts) > replica and len(parts) > 1 else parts[0]
    refuse("pipelines cannot be cut by time", problems)
    return replace(pipeline, **found)


def _least_numbers(name: str, text: str, words: Sequence[str]) -> tuple[float, ...] | None:
    """Return the least number of each stage in any pipeline, separated by semicolons; None for a word.

    Raises:
      ValueError: some pipelines have words and others numbers, or they have different numbers of stages.
    """
    parts = dict.fromkeys(text.split(";"))
    given = [each for part in parts if (each := parse_stage_numbers(name, part, words)) is not None]
    if len(parts) > 1 and (len(given) < len(parts) or len(set(map(len, given))) > 1):
        raise ValueError(
            f"{name} is {text!r}, and all pipelines get one cut; give a number for each stage in all of them,"
            " or one for all pipelines"
        )
    return tuple(map(min, zip(*given, strict=True))) if given else None


def format_predicted_cut(run: Run, source: Any, num_stages: int | None) -> str:
    """Format the cuts by time for equal devices, without islands; options may give speeds and memories.

    Args:
      run: a run of a pipeline across islands that is cut by time.
      source: its samples.
      num_stages: number of stages; by default the partitions, or the speeds or memories that were given.

    Raises:
      ValueError: nothing says how many stages there are, or no cut fits.
    """
    strategy = run.strategy
    texts = (strategy.pipeline.stage_speeds, strategy.pipeline.stage_memory)
    given = [text.split(";") for text in texts if text not in (*SPEEDS, *MEMORY)]
    numbers = [part for parts in given for part in parts if part not in (*SPEEDS, *MEMORY)]
    num_stages = num_stages or strategy.across.partitions or next((x.count(",") + 1 for x in numbers), None)
    if num_stages is None:
        raise ValueError(
            "a cut by time was asked for, and nothing says for how many stages; give --pipeline-stages, or"
            " --stage-speeds with a number for each"
        )
    number = math.prod(max(size, 1) for size in strategy.layout.mesh.values())
    island = describe_island_devices(strategy.layout, "equal devices", number)
    num_replicas = max(map(len, given), default=1)
    return _cut(run, source, [[island] * num_stages] * num_replicas)[0]


def describe_island_devices(layout: Layout, kind: str, number: int) -> StageIslandDevices:
    """Return the devices of an island, and how its layout shards state and rows over them."""
    sizes = axis_sizes(layout.mesh, number)
    tensor, fsdp = sizes[TENSOR], sizes[FSDP]
    return StageIslandDevices(kind, number, tensor * (fsdp if layout.zero == 3 else 1), sizes[DATA] * fsdp)


def find_stage_devices(
    pipeline: Pipeline, replicas: Sequence[Sequence[StageIslandDevices]]
) -> tuple[list[StageDevices], str]:
    """Return the devices of each stage, and where their speeds are from.

    A stage is as fast, and has as much memory, as the least of its islands in all replicas.

    Args:
      pipeline: the options.
      replicas: for each replica, the island of each stage.

    Raises:
      ValueError: another number of speeds or memories than stages; a link speed with speeds in no unit.
    """
    num_stages = len(replicas[0])
    speeds = _least_numbers("stage_speeds", pipeline.stage_speeds, SPEEDS)
    memory = _least_numbers("stage_memory", pipeline.stage_memory, MEMORY)
    problems = [
        f"{name} has {len(given)} numbers, and there are {num_stages} stages; give one each"
        for name, given in (("stage_speeds", speeds), ("stage_memory", memory))
        if given is not None and len(given) != num_stages
    ]
    every = [island for replica in replicas for island in replica]
    known = {island.kind: find_device(island.kind) for island in every}
    measures = pipeline.stage_speeds == "measured"
    takes_memory = set(pipeline.stage_memory.split(";")) == {"auto"}
    # the peak rates in the dtype that all have: bfloat16, else float32
    matrix = {kind: device and device.matrix_flops_per_second for kind, device in known.items()}
    float32 = {kind: device and device.float32_flops_per_second for kind, device in known.items()}
    rates = matrix if all(matrix.values()) or not all(float32.values()) else float32
    unknown = sorted(kind for kind, rate in rates.items() if rate is None)
    counted = "by the speeds that were given"
    if speeds is None and unknown and not measures:
        counted = f"by the number of devices, as the speed of {', '.join(unknown)} is not known"
        if pipeline.link_speed is not None:
            problems.append(
                f"link_speed is {pipeline.link_speed}, and the speed of {', '.join(unknown)} is not known;"
                " give stage_speeds in teraflops a second"
            )
    elif speeds is None:
        counted = "by the peak rates of their devices"
    if measures:
        counted = "by the measured speed of their devices"
        if any(island.flops_per_second is None for island in every):
            problems.append("stage_speeds is 'measured', and no islands are there; give numbers, or auto")
    refuse(f"{num_stages} stages cannot be cut by time", problems)

    def speed(island: StageIslandDevices) -> float:
        if island.flops_per_second is not None:
            return island.number * island.flops_per_second
        return island.number * (1.0 if unknown else rates[island.kind] or 1.0)

    def room(island: StageIslandDevices) -> float:
        device = known[island.kind]
        return device.memory_bytes if device is not None and takes_memory else math.inf

    found = [
        StageDevices(
            flops_per_second=speeds[stage] * TERA if speeds else min(map(speed, islands)),
            memory_bytes=memory[stage] * GB if memory else min(map(room, islands)),
            state_shards=min(island.state_shards for island in islands),
            row_shards=min(island.row_shards for island in islands),
        )
        for stage, islands in enumerate(zip(*replicas, strict=True))
    ]
    return found, counted


def cut_text(costs: StageCosts, cut: StageCut, counted: str) -> str:
    """Format a cut: a row a stage, and its step time relative to the equal cut, if that fits the memory.

    Args:
      costs: the costs of the model's blocks.
      cut: the best one.
      counted: where the speeds are from.
    """
    most, fastest = max(cut.busy_seconds), max(each.flops_per_second for each in costs.devices)
    rows = []
    for stage, devices in enumerate(costs.devices):
        memory = bytes_text(cut.memory_bytes[stage])
        if devices.memory_bytes < math.inf:
            memory += f" of {bytes_text(devices.memory_bytes)}"
        speed = f"{devices.flops_per_second / fastest:.3g}"
        busy = f"{cut.busy_seconds[stage] / most:.0%}"
        rows.append((str(stage), str(cut.counts[stage]), speed, busy, str(costs.live[stage]), memory))
    header = ("stage", "blocks", "speed", "time", "in flight", "memory a device")
    equal = tuple(counts("equal", costs.num_blocks, costs.num_stages))
    name = f"the equal cut {','.join(map(str, equal))}"
    beside = f"{name} does not fit the memory"
    if fits(costs, equal):
        ratio = costs.simulated(equal).makespan / cut.simulated.makespan
        beside = f"predicted {ratio:.2f} times as fast as {name}"
    bubble = f"bubble {cut.simulated.bubble:.1%}"
    return f"{table_text(header, rows)}stages cut by time, {counted}: {bubble}; {beside}"


TIME_NEEDS_BLOCKS = (
    "stages is 'time', which predicts the times of blocks, and the model has no `blocks`; use --stages flops,"
    " which cuts any model, or give it `blocks` (docs/pipeline.md)"
)


def trace(run: Run, source: Any, num_replicas: int, row_shards: int = 1) -> ChainTrace:
    """Trace the functions of a run's model, for the rows of one replica's microbatch on a device.

    Raises:
      ValueError: the model has no blocks.
    """
    model = make_model(run)
    if model.chain is None:
        raise ValueError(TIME_NEEDS_BLOCKS)
    rows = max(run.batch // run.strategy.accumulate // num_replicas // row_shards, 1)
    batch = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in make_microbatch(run, source).items()
    }
    return ChainTrace(model, run.loss, batch)


LEAST_RUNS, LEAST_SECONDS = 5, 1.0
"""Least runs and seconds of a block: a core that others use too is fast for a moment."""


def flops_per_second(traced: ChainTrace, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the flops per second of one local device, in the forward and backward of the costliest block.

    The block is compiled and run on arbitrary values, for the traced rows.

    Args:
      traced: the model's functions.
      clock: seconds.
    """
    costs = traced.costs("flops").blocks
    number = max(range(len(costs)), key=lambda i: costs[i])
    entering = traced.entering
    for before in range(0 if traced.chain.stacked else number):
        entering = jax.eval_shape(partial(traced.run, before), traced.block(before), entering)
    inputs = jax.tree.map(_values, (traced.block(number), entering))

    def total(inputs: Any) -> tuple[jax.Array, tuple[()]]:
        found = filter(_is_float, jax.tree.leaves(traced.run(number, *inputs)))
        return sum((jnp.square(x.astype(jnp.float32)).sum() for x in found), jnp.float32(0)), ()

    gradients = jax.jit(value_and_grad(total))
    jax.block_until_ready(gradients(inputs))  # compiles
    runs, seconds, start = 0, 0.0, clock()
    while runs < LEAST_RUNS or seconds < LEAST_SECONDS:
        jax.block_until_ready(gradients(inputs))
        runs, seconds = runs + 1, clock() - start
    return (1 + BACKWARD) * costs[number] * runs / seconds


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _values(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return random values that no operation skips and that do not overflow."""
    if not _is_float(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    return (0.02 * jax.random.normal(new_key(0), shape.shape)).astype(shape.dtype)
