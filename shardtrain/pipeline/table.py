"""A table of tasks: which stage does what in which tick. No jax.

A stage is a place along the pipeline, a chunk one of its parts: chunk `v` of stage `s` is part `v * S + s`
of the model. What runs, simulates or draws a schedule reads a table. Next: `check.py` (whether it can run),
`schedule.py` (the schedules we know).
"""

from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("forward", "backward", "weight")
"""In the order in which a lock-step tick does them. A backward makes the gradients of input and weights;
in a table with weight tasks it makes those of the input only."""


class Task(NamedTuple):
    """One piece of work; all numbers count from 0."""

    tick: int
    stage: int
    chunk: int
    microbatch: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule as data; `check` says whether it can run.

    Args:
      num_stages: S, places that work at the same time.
      num_microbatches: M, parts of a batch.
      num_chunks: V, parts of the model on each stage.
      lockstep: every tick waits for all stages, as in a mesh: a stage does one task of each kind in a tick,
        in the order of `KINDS`. Otherwise it does one task a tick, and only the order of its tasks counts.
      tasks: in any order; kept sorted by tick, stage and kind.
      name: of the schedule, or of the file it came from.
      kinds: what every part does with every microbatch; by default all kinds among the tasks.

    >>> Table(num_stages=1, num_microbatches=1, tasks=(Task(0, 0, 0, 0, "forward"),), name="mine").kinds
    ('forward',)
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    lockstep: bool = False
    tasks: tuple[Task, ...]
    name: str
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        found = {task.kind for task in self.tasks}
        if not self.kinds:
            object.__setattr__(self, "kinds", tuple(kind for kind in KINDS if kind in found))
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks, key=_place)))

    @property
    def num_ticks(self) -> int:
        """Ticks from 0 to the last one with a task."""
        return 1 + max((task.tick for task in self.tasks), default=-1)

    @property
    def num_parts(self) -> int:
        """V * S: the parts that the model is cut into."""
        return self.num_chunks * self.num_stages

    @property
    def has_weight(self) -> bool:
        """Whether gradients of weights are tasks of their own."""
        return "weight" in self.kinds

    def part(self, task: Task) -> int:
        """The part of the model that a task is about."""
        return task.chunk * self.num_stages + task.stage

    def order(self, stage: int) -> list[Task]:
        """The tasks of a stage, in the order in which it does them."""
        return [task for task in self.tasks if task.stage == stage]

    def live(self, stage: int) -> int:
        """The largest number of (chunk, microbatch) that a stage holds at once.

        From the beginning of their forward to the end of their last task.
        """
        held = most = 0
        for task in self.order(stage):
            held += task.kind == "forward"
            most = max(most, held)
            held -= task.kind == self.kinds[-1]
        return most


def needs(table: Table, task: Task) -> list[tuple[str, int]]:
    """What must be done with the same microbatch before a task: (kind, part) of each.

    What another part makes travels between ticks, so it must be done in an earlier one. What the part itself
    makes must be earlier too, but a lock-step tick may do both.

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


def _place(task: Task) -> tuple[int, int, int]:
    return task.tick, task.stage, KINDS.index(task.kind) if task.kind in KINDS else len(KINDS)
