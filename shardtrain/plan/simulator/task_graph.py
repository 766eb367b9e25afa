"""Tasks of a training step: what each needs, which device or link it occupies, when it runs. No jax."""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from shardtrain.errors.messages import problems_error

Key = tuple[int, ...]
"""The number of a task; those of an operator begin alike. Compared like words: (1, 5) < (2,)."""

KINDS = ("forward", "backward", "update", "transfer", "collective")
"""What a task does: computations of a device, then what is sent to one other device, or among several."""

MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Task:
    """Something that occupies one device or link for some time.

    Args:
      key: its number; a task needs tasks of smaller numbers alone, so no circle is possible.
      name: what a reader sees, such as "backward, block 3".
      kind: one of `KINDS`.
      queue: the device or link that it occupies, such as "device 0".
      seconds: how long, 0 or more.
      needs: the tasks that are done before it begins.
    """

    key: Key
    name: str
    kind: str
    queue: str
    seconds: float
    needs: tuple[Key, ...] = ()


@dataclass(frozen=True)
class TaskGraph:
    """Tasks by number.

    Args:
      tasks: in any order; kept sorted by number.

    Raises:
      ValueError: lists tasks with the same number, of unknown kind, of no possible duration, or that need a
        task which is not there or whose number is not smaller.

    >>> graph = TaskGraph([Task((0,), "forward", "forward", "device 0", 1.0)])
    >>> TaskGraph([*graph, Task((1,), "backward", "backward", "device 0", 2.0, needs=((0,),))]).work_seconds
    3.0
    """

    tasks: Iterable[Task]

    def __post_init__(self) -> None:
        given = sorted(self.tasks, key=lambda task: task.key)
        object.__setattr__(self, "tasks", tuple(given))
        twice = [a.key for a, b in pairwise(given) if a.key == b.key]
        problems = [f"task {key} is there twice; give each a number of its own" for key in twice]
        by_key = {task.key: task for task in given}
        problems += [text for task in given for text in _problems(task, by_key)]
        if problems:
            raise problems_error("these tasks are no graph", problems[:MOST_PROBLEMS])

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

    @property
    def work_seconds(self) -> float:
        """Seconds of all tasks, one after the other."""
        return math.fsum(task.seconds for task in self)


def _problems(task: Task, others: Mapping[Key, Task]) -> Iterator[str]:
    if task.kind not in KINDS:
        yield f"task {task.key} has kind {task.kind!r}; use one of {', '.join(KINDS)}"
    if not 0 <= task.seconds < math.inf:
        yield f"task {task.key} takes {task.seconds} s; give a number from 0"
    for need in task.needs:
        if need >= task.key:
            yield f"task {task.key} needs task {need}; number tasks so that each needs smaller ones"
        elif need not in others:
            yield f"task {task.key} needs task {need}, which is not there; add it, or leave the need out"


@dataclass(frozen=True)
class Timeline:
    """When each task is ready, begins and ends, in seconds.

    Args:
      ready: when all that a task needs is done.
      start: when it begins; in this order it is taken from its queue.
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

    A task is ready when all that it needs is done. Each queue does its tasks in the order in which they
    become ready; of those that become ready at the same time, the smaller number is first.

    Args:
      tasks: by number, with all that they need.

    >>> first = Task((0,), "first", "forward", "device 0", 1.0)
    >>> sent = Task((1,), "sent", "transfer", "link", 5.0, needs=((0,),))
    >>> beside = Task((2,), "beside", "forward", "device 0", 2.0, needs=((0,),))
    >>> last = Task((3,), "last", "forward", "device 0", 1.0, needs=((1,), (2,)))
    >>> found = TaskGraph([first, sent, beside, last]).timeline
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
    # tasks taken out later are ready later, or have a larger number
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
