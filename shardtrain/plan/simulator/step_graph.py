"""Make the task graph of a predicted step: tasks of its schedule by blocks, collectives, update. No jax.

All devices of a stage do the same at the same time, so a stage has one queue for computation and one for each
link. Without overlap, the step takes the time that `plan/predict.py` predicts. Next: `task_graph.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardtrain.pipeline.table import Table
from shardtrain.pipeline.table import Task as TableTask
from shardtrain.plan.simulator.task_graph import Key, Task, TaskGraph
from shardtrain.plan.step_collectives import (
    GRADIENT,
    MICROBATCH,
    MICROBATCH_GRADIENT,
    START,
    UPDATED,
    Collective,
)
from shardtrain.plan.step_times import StepTimes

BETWEEN_STAGES = "link between stages"


def make_step_graph(times: StepTimes, *, overlap: bool = False) -> TaskGraph:
    """Return the tasks of a step.

    Args:
      times: the durations of its parts.
      overlap: whether gradients are summed while devices compute: the sum of a block begins when its backward
        in the last microbatch is done, and only the optimizer waits for it. Without it nothing overlaps, as
        in the prediction.
    """
    building = _Building(times=times, overlap=overlap)
    building.add_start()
    for _, tick in groupby(building.table.tasks, key=lambda task: task.tick):
        building.add_tick(list(tick))
    building.add_end()
    return TaskGraph(tuple(building.tasks))


@dataclass(kw_only=True)
class _Building:
    """A graph that is being built.

    Args:
      times: the durations of the step.
      overlap: whether gradients are summed while devices compute.
      tasks: the tasks so far; their numbers count up.
      last: tasks that the next task of each stage needs.
      open: further tasks that the optimizer of each stage needs.
    """

    times: StepTimes
    overlap: bool
    tasks: list[Task] = field(default_factory=list)
    last: list[tuple[Key, ...]] = field(init=False)
    open: list[list[Key]] = field(init=False)
    table: Table = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.times.table
        self.last = [()] * self.times.num_stages
        self.open = [[] for _ in range(self.times.num_stages)]

    def add(self, name: str, kind: str, queue: str, seconds: float, needs: Sequence[Key]) -> tuple[Key, ...]:
        """Add a task; return a tuple of its number."""
        key = (len(self.tasks),)
        self.tasks.append(Task(key, name, kind, queue, seconds, tuple(dict.fromkeys(needs))))
        return (key,)

    def compute(self, stage: int, name: str, kind: str, seconds: float) -> None:
        queue = _format_stage("compute", stage, self.times.num_stages)
        self.last[stage] = self.add(name, kind, queue, seconds, self.last[stage])

    def send(self, each: Collective, stage: int, seconds: float, needs: Sequence[Key]) -> tuple[Key, ...]:
        """Add a collective of a stage."""
        queue = _format_stage(each.link, stage, self.times.num_stages)
        name = f"{each.kind} over {'+'.join(each.axes)}, {each.phase}"
        return self.add(name, "collective", queue, seconds, needs)

    def add_start(self) -> None:
        """Add the collectives before the first microbatch."""
        for each in self._select(START):
            self._add_on_all_stages(each, each.seconds)

    def add_tick(self, tasks: Sequence[TableTask]) -> None:
        """Add the tasks of a tick; the next tick waits for all stages and their sends."""
        for task in tasks:
            self._add_task(task)
        if self.times.num_stages > 1:
            for stage in range(self.times.num_stages):
                self.compute(stage, f"slots, tick {tasks[0].tick}", "forward", self.times.tick)
            needs = [key for keys in self.last for key in keys]
            name = f"activations and cotangents to other stages, tick {tasks[0].tick}"
            sent = self.add(name, "transfer", BETWEEN_STAGES, self.times.hops, needs)
            self.last = [sent] * self.times.num_stages

    def _add_task(self, task: TableTask) -> None:
        """Add a task of the table block by block, each with the collectives of a microbatch."""
        times = self.times
        whole = times.task(task.stage, task.chunk, task.kind)
        is_last = task.kind == self.table.kinds[-1] and task.microbatch == self.table.num_microbatches - 1
        kind = "forward" if task.kind == "forward" else "backward"
        for name, seconds, num_blocks in self._list_parts(task, whole):
            self.compute(task.stage, f"{name}, microbatch {task.microbatch}", kind, seconds)
            done = self.last[task.stage]
            for each in self._select(MICROBATCH, MICROBATCH_GRADIENT):
                # a collective takes the same part of the time of each task
                found = self.send(each, task.stage, each.seconds * times.per_compute * seconds, done)
                if self.overlap and each.phase == MICROBATCH_GRADIENT:
                    self.open[task.stage] += found
                else:
                    self.last[task.stage] = done = found
            if self.overlap and is_last and num_blocks:
                self._sum_block(task.stage, self.last[task.stage])

    def _list_parts(self, task: TableTask, whole: float) -> Iterator[tuple[str, float, int]]:
        """Yield name, seconds and number of blocks of the parts of a table's task, in order."""
        times = self.times
        parts = times.num_stages * self.table.num_chunks
        count = times.num_blocks // parts if times.forward else 0
        first = self.table.part(task) * count
        numbers = range(first, first + count)
        if not count:
            ends = whole
        elif times.num_stages == 1:
            ends = times.ends if task.kind != "forward" else 0.0
        else:
            ends = times.outside(self.table.part(task), task.kind)
        if ends:
            yield f"{task.kind}, outside the blocks" if count else "forward and backward", ends, 0
        for number in numbers if task.kind == "forward" else reversed(numbers):
            yield f"{task.kind}, block {number}", (whole - ends) / count, 1

    def _sum_block(self, stage: int, needs: tuple[Key, ...]) -> None:
        """Add the sums of a block's gradient, which run during the next computations."""
        per_stage = self.times.num_blocks / self.times.num_stages
        for each in self._select(GRADIENT):
            if each.of_blocks:
                seconds = each.sent_seconds * each.of_blocks / per_stage + each.latency_seconds
                needs = self.send(each, stage, seconds, needs)
        self.open[stage] += needs

    def add_end(self) -> None:
        """Add the tasks after the last microbatch: sums of gradients, the update, and its collectives."""
        for each in self._select(GRADIENT):
            rest = 1 - each.of_blocks if self.overlap and self.times.forward else 1.0
            if rest:
                self._add_on_all_stages(each, rest * each.sent_seconds + each.latency_seconds)
        for stage in range(self.times.num_stages):
            self.last[stage] += tuple(self.open[stage])
            self.compute(stage, "optimizer", "update", self.times.update)
        for each in self._select(UPDATED):
            self._add_on_all_stages(each, each.seconds)

    def _add_on_all_stages(self, each: Collective, seconds: float) -> None:
        for stage in range(self.times.num_stages):
            self.last[stage] = self.send(each, stage, seconds, self.last[stage])

    def _select(self, *phases: str) -> list[Collective]:
        return [each for each in self.times.collectives if each.phase in phases]


def _format_stage(what: str, stage: int, num_stages: int) -> str:
    return f"stage {stage}: {what}" if num_stages > 1 else what
