"""The timeline of a graph after a few tasks have changed, by simulating again only what changes. No jax.

The idea is that of FlexFlow's delta simulation (Jia et al. 2019, "Beyond Data and Model Parallelism for Deep
Neural Networks", section 5.3). The result is that of `timeline.py`, bit for bit: a timeline in which every
task follows the rules there is the only one, and a change is followed in the order of events until all do.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable

from shardtrain.errors.messages import problems_error
from shardtrain.plan.simulator.task_graph import MOST_PROBLEMS, Key, Task, TaskGraph, task_problems
from shardtrain.plan.simulator.timeline import Timeline, run

MOST_FOLLOWED = 0.15
"""The part of all tasks up to which a change is followed; beyond it simulating all is as fast."""

Slot = tuple[float, Key]
"""The seconds at which a task becomes ready, and its number: its place in a queue."""


class DeltaSimulation:
    """A graph that changes, and its timeline.

    Args:
      graph: as it is at first; it is simulated in full.

    Attributes:
      tasks: the tasks now, by number.
      num_simulated: how many times a task was placed on the timeline: each once at first, then those that a
        change may change.

    >>> work = Task((0,), "work", "forward", "device 0", 1.0)
    >>> simulation = DeltaSimulation(TaskGraph([work]))
    >>> simulation.change(put=[Task((0,), "more work", "forward", "device 0", 3.0)])
    >>> simulation.makespan
    3.0
    >>> simulation.undo()
    >>> simulation.makespan
    1.0
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.tasks: dict[Key, Task] = dict(graph.by_key)
        self.num_simulated = 0
        self._users: defaultdict[Key, set[Key]] = defaultdict(set)
        for key, users in graph.users.items():
            self._users[key].update(users)
        self._events: list[Slot] = []
        self._pushed: set[Slot] = set()
        # what the last change replaced: task -> (the task, ready, start, end), None if it was not there
        self._before: dict[Key, tuple[Task, float, float, float] | None] = {}
        self._run()

    def _run(self) -> None:
        """Simulate everything."""
        found = run(self.tasks, self._users)
        self._ready, self._start, self._end = dict(found.ready), dict(found.start), dict(found.end)
        # for each device and link its tasks in their order, which is that of the events
        self._queues: defaultdict[str, list[Slot]] = defaultdict(list)
        for key in self._start:
            self._queues[self.tasks[key].queue].append((self._ready[key], key))
        self.num_simulated += len(self.tasks)

    @property
    def timeline(self) -> Timeline:
        """When each task runs now."""
        return Timeline(dict(self._ready), dict(self._start), dict(self._end))

    @property
    def makespan(self) -> float:
        """Seconds at which all tasks are done."""
        # of a queue the last task ends last
        return max((self._end[queue[-1][1]] for queue in self._queues.values() if queue), default=0.0)

    def change(self, *, remove: Iterable[Key] = (), put: Iterable[Task] = ()) -> None:
        """Remove tasks, and put others in: new ones, or in the place of those with the same number.

        Args:
          remove: numbers of tasks.
          put: tasks.

        Raises:
          ValueError: a task to remove is not there or is needed by one that stays, or a new one cannot be in
            the graph; then nothing has changed.
        """
        removed, new = set(remove), {task.key: task for task in put}
        self._check(removed, new)
        self._before = {}
        for key in (*removed, *new):
            self._note(key)
            if key in self.tasks:
                self._take_out(key)
                for need in self.tasks[key].needs:
                    self._users[need].discard(key)
        for key in removed:
            del self.tasks[key], self._ready[key]
            self._users.pop(key, None)
        for key, task in new.items():
            self.tasks[key] = task
            for need in task.needs:
                self._users[need].add(key)
        for key in new:
            self._examine(key)
        self._follow()

    def undo(self) -> None:
        """Undo the last change; a second call does nothing."""
        for key in self._before:
            if key in self.tasks:
                self._leave_queue(key)
                for need in self.tasks[key].needs:
                    self._users[need].discard(key)
                for of_task in (self.tasks, self._ready, self._start, self._end):
                    del of_task[key]
        for key, before in self._before.items():
            if before is None:
                self._users.pop(key, None)
                continue
            self.tasks[key], self._ready[key], self._start[key], self._end[key] = before
            insort(self._queues[before[0].queue], (before[1], key))
            for need in before[0].needs:
                self._users[need].add(key)
        self._before = {}

    def _check(self, removed: set[Key], new: dict[Key, Task]) -> None:
        both = [key for key in removed if key in new]
        problems = [f"task {key} is both removed and put; leave one of the two out" for key in both]
        problems += [f"task {key} is not there to remove" for key in removed if key not in self.tasks]
        problems += [
            f"task {key} is removed, and task {user} needs it; change that one too"
            for key in removed
            for user in self._users.get(key, ())
            if user not in removed and user not in new
        ]
        others = {
            need: new.get(need) or self.tasks[need]
            for task in new.values()
            for need in task.needs
            if need in new or (need in self.tasks and need not in removed)
        }
        problems += [text for task in new.values() for text in task_problems(task, others)]
        if problems:
            raise problems_error("the tasks cannot be changed like this", problems[:MOST_PROBLEMS])

    def _note(self, key: Key) -> None:
        """Keep what a task was before this change, for `undo`."""
        if key not in self._before:
            known = key in self.tasks
            self._before[key] = (
                (self.tasks[key], self._ready[key], self._start[key], self._end[key]) if known else None
            )

    def _ready_at(self, task: Task) -> float:
        return max([self._end[need] for need in task.needs], default=0.0)

    def _examine(self, key: Key) -> None:
        """Have a task looked at, at the earliest event by which its place could change."""
        slots = [(self._ready[key], key)] if key in self._end else []
        # a need without an end is placed later, and then asks again
        if all(need in self._end for need in self.tasks[key].needs):
            slots.append((self._ready_at(self.tasks[key]), key))
        if slots:
            self._push(min(slots))

    def _push(self, slot: Slot) -> None:
        # nothing asks for an event again that is over, so each is there once
        if slot not in self._pushed:
            self._pushed.add(slot)
            heapq.heappush(self._events, slot)

    def _follow(self) -> None:
        """Go through the events until every task follows the rules.

        An event causes only later ones: what a task does has an effect on tasks that are ready later, or at
        the same time with a larger number. So what was ready before the event is as it will stay.
        """
        most = self.num_simulated + len(self.tasks) * MOST_FOLLOWED
        while self._events:
            if self.num_simulated > most:
                self._events, self._pushed = [], set()
                for key in self.tasks:
                    self._note(key)
                self._run()
                return
            at, key = heapq.heappop(self._events)
            task = self.tasks.get(key)
            if task is None:  # removed by this change
                continue
            if any(need not in self._end for need in task.needs):
                # it was ready by now, and what it needs has become later
                self._take_out(key)
                continue
            ready = self._ready_at(task)
            if key in self._end and self._ready[key] != ready:
                self._take_out(key)
            if ready > at:
                self._push((ready, key))
                continue
            self._place(task, ready)
        self._pushed = set()

    def _place(self, task: Task, ready: float) -> None:
        """Give a task its place in its queue; what it needs, and what is before it there, is final."""
        key, queue = task.key, self._queues[task.queue]
        position = bisect_left(queue, (ready, key))
        start = max(ready, self._end[queue[position - 1][1]]) if position else ready
        end = start + task.seconds
        self.num_simulated += 1
        if key in self._end and (start, end) == (self._start[key], self._end[key]):
            return
        self._note(key)
        if key not in self._end:
            queue.insert(position, (ready, key))
        self._ready[key], self._start[key], self._end[key] = ready, start, end
        self._examine_after(queue, position + 1, key)

    def _examine_after(self, queue: list[Slot], position: int, key: Key) -> None:
        """Have the next task of the queue and the users of a changed task looked at."""
        if position < len(queue):
            self._push(queue[position])
        for user in self._users.get(key, ()):
            self._examine(user)

    def _take_out(self, key: Key) -> None:
        """Take a task from the timeline, until it is placed again."""
        if key not in self._end:
            return
        self._note(key)
        position = self._leave_queue(key)
        del self._start[key], self._end[key]
        self._examine_after(self._queues[self.tasks[key].queue], position, key)

    def _leave_queue(self, key: Key) -> int:
        queue = self._queues[self.tasks[key].queue]
        position = bisect_left(queue, (self._ready[key], key))
        del queue[position]
        return position
