"""When each task of a graph runs: the full simulation. No jax.

Next: `placed_task.py`, the simulation itself; `delta.py`, the same after a few tasks have changed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardtrain.plan.simulator.placed_task import placed_tasks, simulate
from shardtrain.plan.simulator.task_graph import Key, TaskGraph


@dataclass(frozen=True)
class Timeline:
    """When each task is ready, begins and ends.

    Args:
      ready: seconds at which all that a task needs is done.
      start: seconds at which it begins; in this order it is taken from its queue.
      end: seconds at which it is done.
    """

    ready: Mapping[Key, float]
    start: Mapping[Key, float]
    end: Mapping[Key, float]

    @property
    def makespan(self) -> float:
        """Seconds at which all tasks are done."""
        return max(self.end.values(), default=0.0)


def timeline(graph: TaskGraph) -> Timeline:
    """Simulate a graph.

    A task is ready when all that it needs is done. Each queue does its tasks in the order in which they
    become ready; of those that become ready at the same time, the smaller number is first.

    >>> from shardtrain.plan.simulator.task_graph import Task
    >>> first = Task((0,), "first", "forward", "device 0", 1.0)
    >>> sent = Task((1,), "sent", "transfer", "link", 5.0, needs=((0,),))
    >>> beside = Task((2,), "beside", "forward", "device 0", 2.0, needs=((0,),))
    >>> last = Task((3,), "last", "forward", "device 0", 1.0, needs=((1,), (2,)))
    >>> found = timeline(TaskGraph([first, sent, beside, last]))
    >>> found.start[2,], found.start[3,], found.makespan
    (1.0, 6.0, 7.0)
    """
    order = simulate(placed_tasks(graph.by_key, defaultdict(list)).values())
    return Timeline(
        {each.key: each.ready for each in order},
        {each.key: each.start for each in order},
        {each.key: each.end for each in order},
    )
