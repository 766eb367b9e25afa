"""A schedule as a table of tasks: which stage does what in which tick. No jax.

Everything that runs, simulates or draws a schedule reads a table. Next: `part_placement.py` (which part of
the model a chunk of a stage is), `check.py` (whether a table can run), `schedule.py` (the named schedules).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardtrain.pipeline.part_placement import PartPlacement

KINDS = ("forward", "backward", "weight")
"""Kinds of tasks, in the order in which a lock-step tick does them. A backward computes the gradients of a
part's input and weights; in a table with weight tasks only those of its input."""


class Task(NamedTuple):
    """The computation of one stage on one microbatch in one tick; all numbers count from 0."""

    tick: int
    stage: int
    chunk: int
    microbatch: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule as data; `check` verifies that it can run.

    Args:
      num_stages: S, stages that compute at the same time.
      num_microbatches: M, microbatches of a batch.
      num_chunks: V, parts of the model on each stage.
      placement: which part each chunk of a stage is, a name of `part_placement.PLACEMENTS`.
      lockstep: every tick waits for all stages, as in a mesh: a stage does one task of each kind in a tick,
        in the order of `KINDS`. Otherwise it does one task a tick, and only the order of its tasks counts.
      tasks: in any order; kept sorted by tick, stage and kind.
      name: the name of the schedule, or of the file that the table was read from.
      kinds: kinds of tasks of each part and microbatch; by default all kinds among the tasks.
      live_bound: for each stage, the most (chunk, microbatch) that it may keep at once; None: any number.

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
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks, key=_position)))

    @property
    def num_ticks(self) -> int:
        """Ticks from 0 to the last one with a task."""
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
        live = most = 0
        for task in self.order(stage):
            live += task.kind == "forward"
            most = max(most, live)
            live -= task.kind == self.kinds[-1]
        return most

    def delayed_weights(self, stage: int) -> int:
        """Return the largest number of (chunk, microbatch) on a stage between backward and weight task.

        Each counts from the start of its backward to the end of its weight task; 0 without weight tasks.
        """
        if not self.has_weight:
            return 0
        delayed = most = 0
        for task in self.order(stage):
            delayed += task.kind == "backward"
            most = max(most, delayed)
            delayed -= task.kind == "weight"
        return most


def needs(table: Table, task: Task) -> list[tuple[str, int]]:
    """Return the dependencies of a task among those of its microbatch: (kind, part) of each.

    Results of another part are sent between ticks, so that part must be done in an earlier tick. Results of
    the part itself must be earlier too, but a lock-step tick may do both.

    >>> table = Table(num_stages=4, num_microbatches=1, tasks=(), name="mine")
    >>> needs(table, Task(5, 2, 0, 0, "backward"))
    [('forward', 2), ('backward', 3)]
    """
    part = table.part(task)
    if task.kind == "forward":
        return [("forward", part - 1)] if part else []
    if task.kind == "weight":
        return [("backward", part)]
    return [("forward", part), *([("backward", part + 1)] if part < table.num_parts - 1 else [])]


def _position(task: Task) -> tuple[int, int, int]:
    return task.tick, task.stage, KINDS.index(task.kind) if task.kind in KINDS else len(KINDS)
