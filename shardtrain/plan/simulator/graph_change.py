"""A change of a graph of tasks: whether it can be made, and what it replaces. No jax. Next: `delta.py`."""

from collections.abc import Mapping, Set
from typing import NamedTuple

from shardtrain.errors.messages import problems_error
from shardtrain.plan.simulator.placed_task import PlacedTask, Slot
from shardtrain.plan.simulator.task_graph import MOST_PROBLEMS, Key, Task, task_problems


class Before(NamedTuple):
    """A task before a change; `task` is None if it was not there."""

    placed: PlacedTask
    task: Task | None
    needs: tuple[PlacedTask, ...]
    queue: list[Slot]
    ready: float
    start: float
    end: float

    @classmethod
    def of(cls, placed: PlacedTask) -> "Before":
        """Return what a task is now."""
        return cls(placed, placed.task, placed.needs, placed.queue, placed.ready, placed.start, placed.end)


def check_change(placed: Mapping[Key, PlacedTask], removed: Set[Key], new: Mapping[Key, Task]) -> None:
    """Check that tasks can be removed from a graph, and others put into it.

    Args:
      placed: the tasks of the graph, by number.
      removed: numbers of tasks.
      new: the tasks to put in, by number.

    Raises:
      ValueError: lists why not.
    """
    problems = [
        f"task {key} is both removed and put; leave one of the two out" for key in removed & new.keys()
    ]
    problems += [f"task {key} is not there to remove" for key in removed if key not in placed]
    problems += [
        f"task {key} is removed, and task {user.key} needs it; change that one too"
        for key in removed
        if key in placed
        for user in placed[key].users
        if user.key not in removed and user.key not in new
    ]
    others = {
        need: new.get(need) or placed[need].task
        for task in new.values()
        for need in task.needs
        if need in new or (need in placed and need not in removed)
    }
    problems += [text for task in new.values() for text in task_problems(task, others)]
    if problems:
        raise problems_error("the tasks cannot be changed like this", problems[:MOST_PROBLEMS])
