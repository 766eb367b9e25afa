"""When each task of a graph runs: the full simulation, by events. No jax.

Each device and link does one task at a time, in the order in which they become ready (Jia et al. 2019,
"Beyond Data and Model Parallelism for Deep Neural Networks", section 5.2 and algorithm 1).
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardtrain.plan.simulator.task_graph import Key, Task, TaskGraph


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
    return run(graph.by_key, graph.users)


def run(tasks: Mapping[Key, Task], users: Mapping[Key, Collection[Key]]) -> Timeline:
    """Simulate tasks that are known to be a graph.

    Args:
      tasks: by number.
      users: task -> the tasks that need it; those without any may be left out.
    """
    waiting = {key: len(task.needs) for key, task in tasks.items()}
    ready = dict.fromkeys(waiting, 0.0)
    free: defaultdict[str, float] = defaultdict(float)
    start: dict[Key, float] = {}
    end: dict[Key, float] = {}
    # tasks whose needs are done: those taken out later are ready later, or have a larger number
    events = [(0.0, key) for key, number in waiting.items() if not number]
    heapq.heapify(events)
    while events:
        at, key = heapq.heappop(events)
        task = tasks[key]
        start[key] = max(at, free[task.queue])
        end[key] = free[task.queue] = start[key] + task.seconds
        for user in users.get(key, ()):
            ready[user] = max(ready[user], end[key])
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(events, (ready[user], user))
    return Timeline(ready, start, end)
