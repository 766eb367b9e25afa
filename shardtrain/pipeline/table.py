"""A schedule as a table of tasks: which stage does which task in which tick. No jax.

Executors, the simulator and plots read tables. Next: `part_placement.py` (the part of the model of each chunk
of a stage), `schedule.py` (the named schedules).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardtrain.errors.messages import near, refuse
from shardtrain.pipeline.part_placement import PartPlacement, find_placement_problem

KINDS = ("forward", "backward", "weight")
"""Kinds of tasks, in their order in a lock-step tick. A backward computes the gradients of a part's input and
weights; in a table with weight tasks only of its input."""


class Task(NamedTuple):
    """The computation of one stage on one microbatch in one tick; all numbers count from 0."""

    tick: int
    stage: int
    chunk: int
    microbatch: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule as data; `check` checks that it can run.

    Args:
      num_stages: S, stages that compute at the same time.
      num_microbatches: M, microbatches of a batch.
      num_chunks: V, parts of the model on each stage.
      placement: name of the placement of parts on stages, see `part_placement.PLACEMENTS`.
      lockstep: whether every tick waits for all stages, as in a mesh: a stage does one task of each kind in a
        tick, in the order of `KINDS`. Otherwise it does one task a tick, and only their order matters.
      tasks: in any order; kept sorted by tick, stage and kind.
      name: the name of the schedule, or of the file that the table was read from.
      kinds: kinds of tasks of each part and microbatch; by default all kinds among the tasks.
      live_bound: for each stage, the largest number of (chunk, microbatch) that it may keep at once; None
        means no limit.

    >>> Table(num_stages=1, num_microbatches=1, tasks=(Task(0, 0, 0, 0, "forward"),), name="mine").kinds
    ('forward',)
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    placement: str = "loop"
    lockstep: bool = False
    tasks: tuple[Task, ...]
    name: str
    kinds: tuple[str, ...] = ()
    live_bound: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        found = {task.kind for task in self.tasks}
        if not self.kinds:
            object.__setattr__(self, "kinds", tuple(kind for kind in KINDS if kind in found))
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks, key=_make_sort_key)))

    @property
    def num_ticks(self) -> int:
        """Number of ticks up to the last one with a task."""
        return 1 + max((task.tick for task in self.tasks), default=-1)

    @cached_property
    def part_placement(self) -> PartPlacement:
        """The stage and chunk of each part."""
        return PartPlacement(num_stages=self.num_stages, num_chunks=self.num_chunks, name=self.placement)

    @property
    def num_parts(self) -> int:
        """V * S: the parts that the model is cut into."""
        return self.part_placement.num_parts

    @property
    def has_weight(self) -> bool:
        """Whether gradients of weights are separate tasks."""
        return "weight" in self.kinds

    def part(self, task: Task) -> int:
        """Return the part of the model that a task computes."""
        return self.part_placement.part(task.stage, task.chunk)

    def order(self, stage: int) -> list[Task]:
        """Return the tasks of a stage in the order of their execution."""
        return [task for task in self.tasks if task.stage == stage]

    def live(self, stage: int) -> int:
        """Return the largest number of (chunk, microbatch) that a stage keeps at once.

        Each counts from the start of its forward to the end of its last task.
        """
        return self._count_most(stage, "forward", self.kinds[-1])

    def delayed_weights(self, stage: int) -> int:
        """Return the largest number of (chunk, microbatch) on a stage between backward and weight task.

        Each counts from the start of its backward to the end of its weight task; 0 without weight tasks.
        """
        return self._count_most(stage, "backward", "weight") if self.has_weight else 0

    def _count_most(self, stage: int, begin: str, end: str) -> int:
        now = most = 0
        for task in self.order(stage):
            now += task.kind == begin
            most = max(most, now)
            now -= task.kind == end
        return most


def list_needs(table: Table, task: Task) -> list[tuple[str, int]]:
    """Return the dependencies of a task among those of its microbatch: (kind, part) of each.

    Results of another part are sent between ticks, so that part must be done in an earlier tick. Results of
    the part itself must be earlier too, but a lock-step tick may do both.

    >>> table = Table(num_stages=4, num_microbatches=1, tasks=(), name="mine")
    >>> list_needs(table, Task(5, 2, 0, 0, "backward"))
    [('forward', 2), ('backward', 3)]
    """
    part = table.part(task)
    if task.kind == "forward":
        return [("forward", part - 1)] if part else []
    if task.kind == "weight":
        return [("backward", part)]
    return [("forward", part), *([("backward", part + 1)] if part < table.num_parts - 1 else [])]


def _make_sort_key(task: Task) -> tuple[int, int, int]:
    return task.tick, task.stage, KINDS.index(task.kind) if task.kind in KINDS else len(KINDS)


def check(table: Table) -> None:
    """Check that a table can run.

    Args:
      table: any table.

    Raises:
      ValueError: lists every task that is missing, duplicate, out of range, in the same tick as another or
        before a dependency, and every stage that keeps more than `table.live_bound`.

    >>> check(Table(num_stages=1, num_microbatches=1, tasks=(Task(0, 0, 0, 0, "forward"),), name="mine"))
    """
    problems = [*_size_problems(table)]
    if not problems:
        outside = [problem for task in table.tasks for problem in _range_problems(table, task)]
        problems = [*outside, *_count_problems(table), *_tick_problems(table), *_order_problems(table)]
    if not problems and table.live_bound is not None:
        problems = _live_problems(table, table.live_bound)
    refuse(f"schedule {table.name!r} cannot run", problems)


def _format_task(task: Task, num_chunks: int) -> str:
    chunk = f" of chunk {task.chunk}" if num_chunks > 1 else ""
    return f"the {task.kind}{chunk} of microbatch {task.microbatch} on stage {task.stage}"


def _size_problems(table: Table) -> list[str]:
    sizes = {"stages": table.num_stages, "microbatches": table.num_microbatches, "chunks": table.num_chunks}
    problems = [f"{what} is {size}; use 1 or more" for what, size in sizes.items() if size < 1]
    problems += [f"kind {near(kind, KINDS)}" for kind in table.kinds if kind not in KINDS]
    if "forward" not in table.kinds or ("weight" in table.kinds and "backward" not in table.kinds):
        problems.append(
            f"its kinds are {list(table.kinds)}; use ['forward'], ['forward', 'backward'] or all three"
        )
    if problem := find_placement_problem(table.placement, table.num_chunks):
        problems.append(problem)
    return problems


def _range_problems(table: Table, task: Task) -> list[str]:
    """Return one problem for each field of a task that is out of range."""
    ends = {"stage": table.num_stages, "chunk": table.num_chunks, "microbatch": table.num_microbatches}
    where = f"in tick {task.tick}, {_format_task(task, table.num_chunks)}"
    problems = [
        f"{where}: {what} is {getattr(task, what)}; there are {end}, 0 to {end - 1}"
        for what, end in ends.items()
        if not 0 <= getattr(task, what) < end
    ]
    problems += [f"{where}: tick is below 0; the first is 0"] if task.tick < 0 else []
    return problems + ([] if task.kind in table.kinds else [f"{where}: kind {near(task.kind, table.kinds)}"])


def _count_problems(table: Table) -> list[str]:
    counts = Counter(task[1:] for task in table.tasks)
    wanted = [
        Task(0, stage, chunk, microbatch, kind)
        for stage in range(table.num_stages)
        for chunk in range(table.num_chunks)
        for microbatch in range(table.num_microbatches)
        for kind in table.kinds
    ]
    missing = [
        f"{_format_task(task, table.num_chunks)} is missing; add it"
        for task in wanted
        if not counts[task[1:]]
    ]
    return missing + [
        f"{_format_task(Task(0, *rest), table.num_chunks)} occurs {count} times; remove {count - 1}"
        for rest, count in counts.items()
        if count > 1
    ]


def _tick_problems(table: Table) -> list[str]:
    """Return one problem for each tick in which a stage has too many tasks."""
    if table.lockstep:
        counts = Counter((task.tick, task.stage, task.kind) for task in table.tasks)
        what, limit = "{} tasks of kind {!r}", "one of each kind in a lock-step tick"
    else:
        counts = Counter((task.tick, task.stage, "") for task in table.tasks)
        what, limit = "{} tasks", "one, or read the table as lock-step"
    return [
        f"tick {tick} of stage {stage} has {what.format(count, kind)}; allowed: {limit}"
        for (tick, stage, kind), count in counts.items()
        if count > 1
    ]


def _order_problems(table: Table) -> list[str]:
    """Return one problem for each task before a dependency; `_count_problems` reports missing ones."""
    tasks = [
        task
        for task in table.tasks
        if 0 <= task.stage < table.num_stages and 0 <= task.chunk < table.num_chunks
    ]
    ticks = {(task.kind, table.part(task), task.microbatch): task.tick for task in tasks}
    problems = []
    for task in tasks:
        for kind, part in list_needs(table, task):
            made = ticks.get((kind, part, task.microbatch))
            same_tick = table.lockstep and part == table.part(task)
            if made is None or made < task.tick or (same_tick and made == task.tick):
                continue
            stage, chunk = table.part_placement.stage(part), table.part_placement.chunk(part)
            source = _format_task(Task(made, stage, chunk, task.microbatch, kind), table.num_chunks)
            problems.append(
                f"{_format_task(task, table.num_chunks)} is in tick {task.tick}, but needs {source},"
                f" which is in tick {made}; move it to tick {made + (not same_tick)} or later"
            )
    return problems


def _live_problems(table: Table, live_bound: Sequence[int]) -> list[str]:
    problems = []
    for stage, bound in enumerate(live_bound):
        live = table.live(stage)
        if live > bound:
            first = f"the {table.kinds[-1]} of the first"
            problems.append(
                f"stage {stage} holds {live} microbatches at once, its bound is {bound};"
                f" do {first} before forward {bound + 1}"
            )
    return problems
