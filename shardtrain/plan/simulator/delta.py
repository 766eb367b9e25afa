"""The timeline of a graph after a few tasks have changed, by simulating again only what changes. No jax.

The idea is that of FlexFlow's delta simulation (Jia et al. 2019, "Beyond Data and Model Parallelism for Deep
Neural Networks", section 5.3). The result is that of `timeline.py`, bit for bit: a timeline in which every
task follows the rules there is the only one, and a change is followed in the order of events until all do.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping

from shardtrain.plan.simulator.graph_change import Before, check_change
from shardtrain.plan.simulator.placed_task import (
    NEVER,
    PlacedTask,
    Queues,
    Slot,
    placed_tasks,
    ready_at,
    simulate,
)
from shardtrain.plan.simulator.task_graph import Key, Task, TaskGraph
from shardtrain.plan.simulator.timeline import Timeline

FIRST_LOOK = 32
"""After so many tasks, and each time twice as many, it is asked whether following the change is worth it."""

MOST_FOLLOWED = 0.4
"""The part of the tasks behind a change up to which it is followed: following one takes as long as simulating
2.5 (docs/benchmarks/planner.md)."""


class DeltaSimulation:
    """A graph that changes, and its timeline.

    Args:
      graph: as it is at first; it is simulated in full.

    Attributes:
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
        self._queues: Queues = defaultdict(list)
        self._placed = placed_tasks(graph.by_key, self._queues)
        self._events: list[Slot] = []
        self._num_changes = 0
        # what the last change replaced, and then simulated anew
        self._before: list[Before] = []
        self._rest: list[tuple[list[Slot], int, list[Slot]]] = []
        self._rest_before: list[tuple[PlacedTask, float, float, float]] = []
        self.num_simulated = len(simulate(self._placed.values()))

    @property
    def tasks(self) -> Mapping[Key, Task]:
        """The tasks now, by number."""
        return {key: each.task for key, each in self._placed.items()}

    def task(self, key: Key) -> Task | None:
        """Return the task with a number; None if there is none."""
        found = self._placed.get(key)
        return None if found is None else found.task

    @property
    def timeline(self) -> Timeline:
        """When each task runs now."""
        each = self._placed.items()
        return Timeline(
            {key: placed.ready for key, placed in each},
            {key: placed.start for key, placed in each},
            {key: placed.end for key, placed in each},
        )

    @property
    def makespan(self) -> float:
        """Seconds at which all tasks are done."""
        # of a queue the last task ends last
        return max((queue[-1][2].end for queue in self._queues.values() if queue), default=0.0)

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
        check_change(self._placed, removed, new)
        self._before, self._rest, self._rest_before = [], [], []
        self._num_changes += 1
        for key in removed:
            placed = self._placed.pop(key)
            self._take_out(placed)
            placed.unlink()
            # one removed before may have asked for it
            placed.asked = NEVER
        linked = [self._replace(task) for task in new.values()]
        for placed in linked:
            if placed is not None:
                placed.link(self._placed)
        for key in new:
            self._ask(self._placed[key])
        self._follow()

    def _replace(self, task: Task) -> PlacedTask | None:
        """Put a task in; return it if what it needs has to be linked."""
        queue, placed = self._queues[task.queue], self._placed.get(task.key)
        if placed is None:
            placed = self._placed[task.key] = PlacedTask(task, queue)
            placed.changed_in = self._num_changes
            self._before.append(Before(placed, None, (), queue, 0.0, 0.0, NEVER))
            return placed
        is_alike = placed.queue is queue and placed.task.needs == task.needs
        if is_alike:
            self._note(placed)
        else:
            self._take_out(placed)
            placed.unlink()
        placed.set_task(task, queue)
        return None if is_alike else placed

    def undo(self) -> None:
        """Undo the last change; a second call does nothing."""
        for queue, position, tail in self._rest:
            queue[position:] = tail
        for placed, ready, start, end in self._rest_before:
            placed.ready, placed.start, placed.end = ready, start, end
        moved = []
        for before in self._before:
            placed, task, _, queue, ready, *_ = before
            if placed.end != NEVER:
                if task is not None and placed.queue is queue and placed.ready == ready:
                    continue
                del placed.queue[bisect_left(placed.queue, (placed.ready, placed.key))]
            moved.append(before)
        for placed, task, needs, *_ in self._before:
            if placed.needs is not needs or task is None:
                placed.unlink()
            if task is None:
                del self._placed[placed.key]
        for before in self._before:
            self._restore(before)
        for placed, task, _, queue, ready, *_ in moved:
            if task is not None:
                insort(queue, (ready, placed.key, placed))
        self._before, self._rest, self._rest_before = [], [], []

    def _restore(self, before: Before) -> None:
        """Give a task what it had before a change, but its place in the queue."""
        placed, task, needs, queue, placed.ready, placed.start, placed.end = before
        if task is None or (placed.task is task and placed.key in self._placed):
            return
        placed.set_task(task, queue)
        placed.needs = needs
        self._placed[task.key] = placed
        for need in needs:
            need.users[placed] = None

    def _note(self, placed: PlacedTask) -> None:
        """Keep what a task was before this change, for `undo`."""
        if placed.changed_in != self._num_changes:
            placed.changed_in = self._num_changes
            self._before.append(Before.of(placed))

    def _ask(self, placed: PlacedTask) -> None:
        """Have a task looked at, at the earliest event by which its place could change."""
        # a need without an end is placed later, and then asks again
        at = ready_at(placed)
        if placed.end != NEVER:
            at = min(at, placed.ready)
        self._push((at, placed.key, placed))

    def _push(self, slot: Slot) -> None:
        # an event that finds its task ready later asks for one at that time: no later one is needed now
        if slot[0] < slot[2].asked:
            slot[2].asked = slot[0]
            heapq.heappush(self._events, slot)

    def _follow(self) -> None:
        """Go through the events until every task follows the rules.

        An event causes only later ones: what a task does has an effect on tasks that are ready later, or at
        the same time with a larger number. So what was ready before the event is as it will stay.
        """
        events, pop = self._events, heapq.heappop
        if not events:
            return
        first, followed, look = events[0], 0, FIRST_LOOK
        while events:
            at, _, placed = slot = pop(events)
            if placed.asked != at:  # an earlier event has been here
                continue
            placed.asked = NEVER
            ready = ready_at(placed)
            if ready != at:
                if placed.end != NEVER and placed.ready != ready:
                    self._take_out(placed)
                if ready != NEVER:
                    self._push((ready, placed.key, placed))
                continue
            self._place(placed, slot)
            followed += 1
            if followed == look:
                look *= 2
                behind, all_behind = self._num_from(slot), self._num_from(first)
                if followed > MOST_FOLLOWED * (all_behind - behind):
                    self._simulate_from(slot)
                    break
        self.num_simulated += followed

    def _num_from(self, slot: Slot) -> int:
        """Count the tasks on the timeline from a slot on."""
        return sum(len(queue) - bisect_left(queue, slot) for queue in self._queues.values())

    def _simulate_from(self, slot: Slot) -> None:
        """Simulate all tasks that are ready later than an event, and those that wait for a place."""
        for _, _, placed in self._events:
            placed.asked = NEVER
        self._events.clear()
        for queue in self._queues.values():
            position = bisect_left(queue, slot)
            self._rest.append((queue, position, queue[position:]))
            del queue[position:]
        rest = [placed for _, _, tail in self._rest for _, _, placed in tail]
        rest += [
            placed
            for placed, *_ in self._before
            if placed.end == NEVER and self._placed.get(placed.key) is placed
        ]
        self._rest_before = [(each, each.ready, each.start, each.end) for each in rest]
        self.num_simulated += len(simulate(rest))

    def _place(self, placed: PlacedTask, slot: Slot) -> None:
        """Give a task its place in its queue; what it needs, and what is before it there, is final."""
        ready, queue, position = slot[0], placed.queue, placed.position
        is_there = placed.end != NEVER and placed.ready == ready
        if not (is_there and position < len(queue) and queue[position] is slot):
            if placed.end != NEVER and not is_there:
                self._note(placed)
                self._leave_queue(placed)
            position = bisect_left(queue, slot)
        start = ready
        if position and queue[position - 1][2].end > start:
            start = queue[position - 1][2].end
        end = start + placed.seconds
        if is_there and start == placed.start and end == placed.end:
            return
        self._note(placed)
        if not is_there:
            queue.insert(position, slot)
        placed.ready, placed.start, placed.end = ready, start, end
        self._ask_behind(queue, position + 1, end)
        for user in placed.users:
            ready = ready_at(user)
            if user.end == NEVER:
                if ready != NEVER:
                    self._push((ready, user.key, user))
            elif ready != user.ready:
                self._push((min(ready, user.ready), user.key, user))

    def _ask_behind(self, queue: list[Slot], position: int, free: float) -> None:
        """Have the next task of a queue looked at if it no longer begins when it can."""
        if position < len(queue):
            slot = queue[position]
            after = slot[2]
            if after.start != (free if free > after.ready else after.ready):
                after.position = position
                self._push(slot)

    def _take_out(self, placed: PlacedTask) -> None:
        """Take a task from the timeline, until it is placed again."""
        if placed.end == NEVER:
            return
        self._note(placed)
        self._leave_queue(placed)
        placed.end = NEVER
        for user in placed.users:
            if user.end != NEVER:
                self._push((user.ready, user.key, user))

    def _leave_queue(self, placed: PlacedTask) -> None:
        queue = placed.queue
        position = bisect_left(queue, (placed.ready, placed.key))
        del queue[position]
        self._ask_behind(queue, position, queue[position - 1][2].end if position else 0.0)
