"""Simulate the tasks of a training step, each of which occupies a device or link. No jax."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

Key = tuple[int, ...]
"""The number of a task, compared like words: (1, 5) < (2,). Tasks of one operator begin alike."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task that occupies one device or link for some time.

    Args:
      key: its number; a task needs only tasks of smaller numbers, so there is no cycle.
      name: its name in reports, such as "backward, block 3".
      kind: "forward", "backward" or "update" on a device; "transfer" to one device, or "collective".
      queue: the device or link that it occupies, such as "device 0".
      seconds: its duration, 0 or more.
      needs: the tasks that must be done before it begins.
    """

    key: Key
    name: str
    kind: str
    queue: str
    seconds: float
    needs: tuple[Key, ...] = ()


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of a step.

    Args:
      tasks: the tasks, each with another number; all that they need are among them.

    >>> first = Task((0,), "forward", "forward", "device 0", 1.0)
    >>> len(TaskGraph((first, Task((1,), "backward", "backward", "device 0", 2.0, needs=((0,),)))).by_key)
    2
    """

    tasks: tuple[Task, ...]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    @cached_property
    def by_key(self) -> Mapping[Key, Task]:
        """The tasks by number."""
        return {task.key: task for task in self}

    @cached_property
    def timeline(self) -> "Timeline":
        """When each task runs."""
        return simulate(self.by_key)


@dataclass(frozen=True)
class Timeline:
    """When each task is ready, begins and ends, in seconds.

    Args:
      ready: when all tasks that a task needs are done.
      start: when it begins.
      end: when it is done.
    """

    ready: Mapping[Key, float]
    start: Mapping[Key, float]
    end: Mapping[Key, float]

    @property
    def makespan(self) -> float:
        """Seconds at which all tasks are done."""
        return max(self.end.values(), default=0.0)


def simulate(tasks: Mapping[Key, Task]) -> Timeline:
    """Simulate tasks, each device and link one at a time (Jia et al. 2019, FlexFlow, algorithm 1).

    Each queue runs its tasks in the order in which they become ready; of tasks that become ready at the same
    time, the smaller number is first.

    Args:
      tasks: the tasks by number, with all tasks that they need.

    >>> first = Task((0,), "first", "forward", "device 0", 1.0)
    >>> sent = Task((1,), "sent", "transfer", "link", 5.0, needs=((0,),))
    >>> beside = Task((2,), "beside", "forward", "device 0", 2.0, needs=((0,),))
    >>> last = Task((3,), "last", "forward", "device 0", 1.0, needs=((1,), (2,)))
    >>> found = TaskGraph((first, sent, beside, last)).timeline
    >>> found.start[2,], found.start[3,], found.makespan
    (1.0, 6.0, 7.0)
    """
    users: defaultdict[Key, list[Key]] = defaultdict(list)
    for key, task in tasks.items():
        for need in task.needs:
            users[need].append(key)
    waiting = {key: len(task.needs) for key, task in tasks.items()}
    ready = dict.fromkeys(tasks, 0.0)
    events = [(0.0, key) for key, number in waiting.items() if not number]
    heapq.heapify(events)
    # tasks that leave the heap later are ready later, or have a larger number
    start, end, free = {}, {}, {}
    while events:
        at, key = heapq.heappop(events)
        task = tasks[key]
        start[key] = begin = max(at, free.get(task.queue, 0.0))
        end[key] = free[task.queue] = done = begin + task.seconds
        for user in users.get(key, ()):
            if done > ready[user]:
                ready[user] = done
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(events, (ready[user], user))
    return Timeline(ready, start, end)
