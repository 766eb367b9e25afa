"""Tasks as objects that know their neighbours, and the simulation of some or all of them by events. No jax.

Each device and link does one task at a time, in the order in which they become ready (Jia et al. 2019,
"Beyond Data and Model Parallelism for Deep Neural Networks", section 5.2 and algorithm 1). Next: `delta.py`.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from shardtrain.plan.simulator.task_graph import Key, Task

NEVER = math.inf
"""The end of a task that is not on the timeline."""

Slot = tuple[float, Key, "PlacedTask"]
"""The seconds at which a task becomes ready, its number, and the task: its place in a queue, or an event."""

Queues = defaultdict[str, list[Slot]]
"""For each device and link its tasks, in their order."""


class PlacedTask:
    """A task of a graph, and when it runs.

    Attributes:
      task: what it is.
      key, seconds: as those of the task.
      queue: the tasks of its device or link that are on the timeline, in their order.
      needs: the tasks that are done before it begins.
      users: the tasks that need it, an ordered set.
      ready: seconds at which all that it needs is done.
      start, end: seconds at which it begins and is done; `end` is `NEVER` while it is not on the timeline.
      waiting: while it is simulated, how many of its needs are not done.
      asked: the seconds of its first event that is still to come.
      changed_in: the number of the last change that moved it.
      position: where it was in its queue when that was last known.
    """

    # looked up millions of times in a search: attributes of slots take a third of a dict's time
    __slots__ = (
        "asked",
        "changed_in",
        "end",
        "key",
        "needs",
        "position",
        "queue",
        "ready",
        "seconds",
        "start",
        "task",
        "users",
        "waiting",
    )

    def __init__(self, task: Task, queue: list[Slot]) -> None:
        self.set_task(task, queue)
        self.needs: tuple[PlacedTask, ...] = ()
        self.users: dict[PlacedTask, None] = {}
        self.ready = self.start = 0.0
        self.end = self.asked = NEVER
        self.waiting = self.changed_in = self.position = 0

    def set_task(self, task: Task, queue: list[Slot]) -> None:
        """Be another task of the same number."""
        self.task, self.key, self.seconds, self.queue = task, task.key, task.seconds, queue

    def link(self, tasks: Mapping[Key, "PlacedTask"]) -> None:
        """Find the tasks that it needs, and be one of their users."""
        self.needs = tuple(dict.fromkeys(tasks[key] for key in self.task.needs))
        for need in self.needs:
            need.users[self] = None

    def unlink(self) -> None:
        """Be no user of the tasks that it needs."""
        for need in self.needs:
            need.users.pop(self, None)


def ready_at(placed: PlacedTask) -> float:
    """Return the seconds at which all that a task needs is done; `NEVER` if some of it has no place."""
    ready = 0.0
    for need in placed.needs:
        if need.end > ready:
            ready = need.end
    return ready


def placed_tasks(tasks: Mapping[Key, Task], queues: Queues) -> dict[Key, PlacedTask]:
    """Return the tasks of a graph by number, none of them on the timeline.

    Args:
      tasks: by number.
      queues: where they are put when they are simulated.
    """
    found = {key: PlacedTask(task, queues[task.queue]) for key, task in tasks.items()}
    for each in found.values():
        each.link(found)
    return found


def simulate(tasks: Iterable[PlacedTask]) -> list[PlacedTask]:
    """Put tasks on the timeline, behind those that are in their queues.

    Args:
      tasks: with all their users; what else they need is on the timeline.

    Returns:
      The tasks in the order in which they are taken from their queues.
    """
    events: list[Slot] = []
    order: list[PlacedTask] = []
    tasks = list(tasks)
    for task in tasks:
        task.end = NEVER
    for task in tasks:
        ready, waiting = 0.0, 0
        for need in task.needs:
            if need.end == NEVER:
                waiting += 1
            elif need.end > ready:
                ready = need.end
        task.ready, task.waiting = ready, waiting
        if not waiting:
            events.append((ready, task.key, task))
    heapq.heapify(events)
    # tasks whose needs are done: those taken out later are ready later, or have a larger number
    pop, push = heapq.heappop, heapq.heappush
    while events:
        slot = pop(events)
        start, _, task = slot
        queue = task.queue
        if queue:
            free = queue[-1][2].end
            if free > start:
                start = free
        queue.append(slot)
        order.append(task)
        task.start = start
        task.end = end = start + task.seconds
        for user in task.users:
            if end > user.ready:
                user.ready = end
            user.waiting -= 1
            if not user.waiting:
                push(events, (user.ready, user.key, user))
    return order
