"""A step of each schedule over MPI beside what the simulator makes of the times of its tasks.

Run it with a rank a stage: `mpiexec -n 2 python benchmarks/pipeline_schedules.py`. All ranks must be on one
host, for they read one clock. Figures: docs/benchmarks/pipeline_schedules.md.
"""

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import tyro
from bridge import bind, others_share
from paired import Spread, spread

from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.islands.bridge import MPI, world
from shardtrain.islands.mailbox import Mailbox
from shardtrain.models.decoder import DecoderConfig
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.cuts import make_partition
from shardtrain.pipeline.options import Pipeline
from shardtrain.pipeline.part_placement import PartPlacement
from shardtrain.pipeline.schedule import SCHEDULES, allowed_chunks, make_table
from shardtrain.pipeline.simulate import simulate
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.pipeline.table import Table, Task
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.stage_executor import Observe, StageExecutor
from shardtrain.train_step.stage_functions import StageFunctions
from shardtrain.train_step.stage_programs import StagePrograms

Key = tuple[int, int, str]
"""Stage, chunk and kind of a task."""

NAP_SECONDS = 5e-4


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      microbatches: M.
      chunks: of the schedule interleaved.
      embed, num_layers, seq, vocab: of the decoder; its blocks are cut evenly.
      rows: of a microbatch.
      rounds: in each, every stage does each task alone, and all do a step of each schedule twice.
      quiet: rounds in which other programs took more than this share of the processors are run again;
        1 takes all.
      seed: of parameters, data and orders.
      json: where to write all figures too.
    """

    microbatches: int = 8
    chunks: int = 2
    embed: int = 128
    num_layers: int = 12
    seq: int = 64
    vocab: int = 256
    rows: int = 2
    rounds: int = 20
    quiet: float = 1.0
    seed: int = 0
    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class TaskTime:
    """A task of a schedule; medians.

    Args:
      alone_seconds: while all other stages wait.
      in_company_seconds: in a step of the schedule, without overlap of tasks on one stage.
    """

    stage: int
    chunk: int
    kind: str
    alone_seconds: float
    in_company_seconds: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule.

    Args:
      schedule: its name.
      bubble: of the simulation, 0 to 1.
      simulated_seconds: of a step, with tasks as long as alone.
      measured_seconds: from the start of the first task to the end of the last.
      ratio: measured over simulated.
      in_company_seconds: simulated with tasks as long as they were in this schedule.
      work_seconds: of the busiest stage, alone.
      all_work_seconds: of all stages.
      tasks: by stage, chunk and kind.
    """

    schedule: str
    bubble: float
    simulated_seconds: float
    measured_seconds: Spread
    ratio: Spread
    in_company_seconds: float
    work_seconds: float
    all_work_seconds: float
    tasks: list[TaskTime]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came out.

    Args:
      message_bytes: of what goes over a boundary for one microbatch.
      transfer_seconds: from an array on one stage to the same on another.
    """

    num_stages: int
    num_cores: int
    options: Options
    message_bytes: int
    transfer_seconds: float
    rows: list[Row]


class Watched(StagePrograms):
    """Programs that can wait for what a forward makes; the sums, which others wait for, come later."""

    made: Any = ()

    def forward(self, part: int, microbatch: int, inputs: Any) -> Any:
        self.made = super().forward(part, microbatch, inputs)
        return self.made

    def wait(self) -> None:
        jax.block_until_ready(self.made)
        super().wait()


class Stage:
    """What this rank has of a decoder whose stages have so many chunks."""

    def __init__(self, options: Options, comm: MPI.Comm, schedule: str, chunks: int) -> None:
        config = DecoderConfig(
            vocab=options.vocab,
            seq=options.seq,
            embed=options.embed,
            num_layers=options.num_layers,
            num_heads=4,
            tied=False,  # nothing is borrowed: a step is its tasks
        )
        model, layout = from_nnx(config), Layout()
        mesh = make_mesh(layout, jax.local_devices()[:1])
        self.has_weight, self.rank, num_rows = False, comm.rank, options.microbatches * options.rows
        tokens = np.random.default_rng(options.seed).integers(0, options.vocab, (num_rows, options.seq + 1))
        batch = {"tokens": tokens.astype(np.int32), "weights": np.ones(num_rows, np.float32)}
        microbatch = {name: x[: options.rows] for name, x in batch.items()}
        pipeline = Pipeline(schedule=schedule, virtual_stages=chunks)
        stages = make_partition(model, pipeline, comm.size, next_token_loss, microbatch)
        traced = Traced(model, next_token_loss, microbatch)
        self.stage_model = StageModel(model=model, stages=stages, traced=traced, stage=comm.rank)
        placement = make_placement(self.stage_model.as_model(), optax.sgd(0.0), layout, mesh)
        self.flow = self.stage_model.flow(microbatch)
        self.programs = Watched(
            StageFunctions(self.stage_model, self.flow, placement, {}, start_row=0, train=True)
        )
        self._batch = place(batch, mesh, layout.batch_axes, options.microbatches)
        self._state = init_state(self.stage_model.as_model(), optax.sgd(0.0), placement, options.seed)

    def begin(self, has_weight: bool) -> None:
        """Before a step; waited for."""
        key = jax.random.key(0)
        self.programs.begin(self._state.params, {}, key, self._batch, has_weight)
        self.programs.wait()

    def alone(self, kinds: Sequence[str]) -> dict[Key, float]:
        """Seconds of each task of this stage, done by itself."""
        self.begin("weight" in kinds)
        found: dict[Key, float] = {}
        for chunk, part in enumerate(self.stage_model.parts):
            inputs = {value: self.random(value) for value in self.flow.reads[part]}
            cotangents = {value: self.random(value) for value in self.flow.writes[part]}
            for kind in kinds:
                given = {"forward": (inputs,), "backward": (inputs, cotangents), "weight": ()}[kind]
                start = time.perf_counter()
                jax.block_until_ready(getattr(self.programs, kind)(part, 0, *given))
                self.programs.wait()
                found[self.rank, chunk, kind] = time.perf_counter() - start
        return found

    def random(self, value: Any) -> jax.Array:
        """An array like a value between parts."""
        shape = self.flow.shapes[value]
        numbers = np.random.default_rng(0).normal(size=shape.shape).astype(shape.dtype)
        return jax.block_until_ready(self.programs.to_devices(value, numbers))


class Side(NamedTuple):
    """A schedule and the programs that carry it out."""

    table: Table
    stage: Stage


def meet(comm: MPI.Comm) -> None:
    """A barrier in which nobody spins: with more ranks than cores that would take the others' time."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP_SECONDS)


def in_turn(comm: MPI.Comm, work: Callable[[], dict[Key, float]]) -> dict[Key, float]:
    """What every rank finds while the others wait; on all ranks."""
    found: dict[Key, float] = {}
    for turn in range(comm.size):
        if turn == comm.rank:
            found = work()
        meet(comm)
    return {key: seconds for each in comm.allgather(found) for key, seconds in each.items()}


def step_seconds(comm: MPI.Comm, side: Side, mailbox: Mailbox, observe: Observe | None = None) -> float:
    """From the start of the first stage's first task to the end of the last task of all."""
    side.stage.begin(side.table.has_weight)
    runner = StageExecutor(side.table, side.stage.flow, mailbox, observe)
    meet(comm)
    start = time.perf_counter()
    runner.run(side.stage.programs)
    side.stage.programs.wait()
    end = time.perf_counter()
    meet(comm)
    starts, ends = zip(*comm.allgather((start, end)), strict=True)
    return max(ends) - starts[0]


def observed(comm: MPI.Comm, side: Side, mailbox: Mailbox) -> dict[Key, float]:
    """Medians of the tasks' times in a step, by task; on all ranks."""
    times: defaultdict[Key, list[float]] = defaultdict(list)

    def observe(task: Task, start: float, end: float) -> None:
        times[task.stage, task.chunk, task.kind].append(end - start)

    step_seconds(comm, side, mailbox, observe)
    mine = {key: median(found) for key, found in times.items()}
    return {key: seconds for each in comm.allgather(mine) for key, seconds in each.items()}


def transfer(comm: MPI.Comm, stage: Stage, mailbox: Mailbox) -> float:
    """Half of the way of a message from stage 0 to stage 1 and back; on all ranks."""
    value = next(iter(stage.flow.shapes))
    shape, array, seconds = stage.flow.shapes[value], stage.random(value), 0.0

    def arrives(source: int) -> jax.Array:
        found = mailbox.receive(shape.shape, shape.dtype, source, 0, "a message there and back")
        return jax.block_until_ready(stage.programs.to_devices(value, found))

    if comm.rank == 0:
        start = time.perf_counter()
        mailbox.send(array, 1, 0)
        arrives(1)
        seconds = (time.perf_counter() - start) / 2
    elif comm.rank == 1:
        mailbox.send(arrives(0), 0, 0)
    meet(comm)
    return comm.bcast(seconds, 0)


class Round(NamedTuple):
    """What one round found, by schedule; and the transfer."""

    alone: dict[str, dict[Key, float]]
    company: dict[str, dict[Key, float]]
    steps: dict[str, float]
    transfer: float


def one_round(comm: MPI.Comm, sides: Mapping[str, Side], mailbox: Mailbox, generator: random.Random) -> Round:
    """Tasks alone, steps, and steps in which tasks are timed; schedules in another order each round."""
    names = list(sides)
    generator.shuffle(names)
    by_programs: dict[Any, dict[Key, float]] = {}
    for side in map(sides.__getitem__, names):
        if _programs(side.table) not in by_programs:
            work = partial(side.stage.alone, side.table.kinds)
            by_programs[_programs(side.table)] = in_turn(comm, work)
    alone = {name: by_programs[_programs(side.table)] for name, side in sides.items()}
    steps = {name: step_seconds(comm, sides[name], mailbox) for name in names}
    company = {name: observed(comm, sides[name], mailbox) for name in names}
    return Round(alone, company, steps, transfer(comm, sides[names[0]].stage, mailbox))


def _programs(table: Table) -> tuple[PartPlacement, tuple[str, ...]]:
    """A key that is equal for schedules with the same tasks in another order."""
    return table.part_placement, table.kinds


def make_sides(options: Options, comm: MPI.Comm) -> dict[str, Side]:
    """All schedules we know, in their form for islands."""
    chunks = {
        name: options.chunks if name == "interleaved" else allowed_chunks(name)[0] for name in SCHEDULES
    }
    stages: dict[Any, Stage] = {}  # shared by the schedules whose parts are the same
    sides = {}
    for name in SCHEDULES:
        table = make_table(name, comm.size, options.microbatches, chunks[name])
        if table.part_placement not in stages:
            stages[table.part_placement] = Stage(options, comm, name, chunks[name])
        sides[name] = Side(table, stages[table.part_placement])
    return sides


def measure(options: Options, comm: MPI.Comm) -> Figures:
    """All figures; all ranks together."""
    if comm.size < 2:
        raise ValueError("a pipeline has 2 stages or more; run it as mpiexec -n 2 python ...")
    mailbox = Mailbox(comm, [f"stage {rank}" for rank in range(comm.size)], 120)
    sides, generator = make_sides(options, comm), random.Random(options.seed)
    go = partial(one_round, comm, sides, mailbox, generator)
    go()  # compiles
    found: list[Round] = []
    while len(found) < options.rounds:
        one, share = others_share(comm, go)
        if share <= options.quiet:
            found.append(one)
    mailbox.close()
    seconds = median(one.transfer for one in found)
    stage = sides["1f1b"].stage
    return Figures(
        num_stages=comm.size,
        num_cores=os.cpu_count() or 1,
        options=options,
        message_bytes=max(map(stage.flow.num_bytes, stage.flow.shapes)),
        transfer_seconds=seconds,
        rows=[summed_up(name, side.table, found, seconds) for name, side in sides.items()],
    )


def medians(found: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """Of each key."""
    return {key: median(each[key] for each in found) for key in sorted(found[0])}


def summed_up(name: str, table: Table, found: Sequence[Round], transfer_seconds: float) -> Row:
    """A schedule, simulated and measured."""
    alone = medians([one.alone[name] for one in found])
    company = medians([one.company[name] for one in found])
    simulated = simulate(table, alone, transfer_seconds)
    measured = [one.steps[name] for one in found]
    stages = [table.order(stage) for stage in range(table.num_stages)]
    work = [sum(alone[task.stage, task.chunk, task.kind] for task in order) for order in stages]
    return Row(
        schedule=name,
        bubble=simulated.bubble,
        simulated_seconds=simulated.makespan,
        measured_seconds=spread(measured),
        ratio=spread([seconds / simulated.makespan for seconds in measured]),
        in_company_seconds=simulate(table, company, transfer_seconds).makespan,
        work_seconds=max(work),
        all_work_seconds=sum(work),
        tasks=[
            TaskTime(
                stage=key[0],
                chunk=key[1],
                kind=key[2],
                alone_seconds=seconds,
                in_company_seconds=company[key],
            )
            for key, seconds in alone.items()
        ],
    )


def report(figures: Figures) -> str:
    """Two tables: schedules, and their tasks."""
    options = figures.options
    lines = [
        f"{figures.num_stages} stages on {figures.num_cores} cores, {options.microbatches} microbatches of"
        f" {options.rows} x {options.seq} tokens, {options.num_layers} blocks of {options.embed}; a message"
        f" of {figures.message_bytes >> 10} KB takes {1e3 * figures.transfer_seconds:.2f} ms;"
        f" {options.rounds} rounds; jax {jax.__version__},"
        f" {MPI.Get_library_version().splitlines()[0].rstrip(chr(0))}",
        "",
        "| schedule | bubble, simulated | simulated ms | measured ms | quartiles | measured / simulated |"
        " 95 % interval of the median | simulated, tasks in company, ms | all work / cores, ms |",
        "|---|--:|--:|--:|---|--:|---|--:|--:|",
    ]
    for row in figures.rows:
        seconds, (low, high) = row.measured_seconds, row.ratio.sure
        lines.append(
            f"| {row.schedule} | {row.bubble:.1%} | {1e3 * row.simulated_seconds:.0f} |"
            f" {1e3 * seconds.median:.0f} | {1e3 * seconds.low:.0f} - {1e3 * seconds.high:.0f} |"
            f" {row.ratio.median:.2f} | {low:.2f} - {high:.2f} | {1e3 * row.in_company_seconds:.0f} |"
            f" {1e3 * row.all_work_seconds / figures.num_cores:.0f} |"
        )
    heads = [f"stage {stage}" for stage in range(figures.num_stages)]
    lines += ["", f"| task, ms alone (in company) | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    by_task: defaultdict[tuple[str, int, str], list[str]] = defaultdict(list)
    for row in figures.rows:
        for task in row.tasks:
            cell = f"{1e3 * task.alone_seconds:.1f} ({1e3 * task.in_company_seconds:.1f})"
            by_task[row.schedule, task.chunk, task.kind].append(cell)
    chunks_of = {row.schedule: {task.chunk for task in row.tasks} for row in figures.rows}
    for (schedule, chunk, kind), cells in by_task.items():
        name = f"{schedule}, chunk {chunk}" if max(chunks_of[schedule]) else schedule
        lines.append(f"| {name}: {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(options: Options) -> None:
    bind()
    comm = world()
    figures = measure(options, comm)
    if comm.rank == 0:
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(figures), indent=1, default=str) + "\n")
        print(report(figures))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
