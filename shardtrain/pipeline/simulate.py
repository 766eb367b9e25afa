"""Simulate the times of a schedule table: start and end of each task, makespan and bubble. No jax."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shardtrain.errors.messages import refuse
from shardtrain.pipeline.table import Table, Task, list_needs

Seconds = Mapping[tuple[int, int, str], float] | Mapping[str, float] | Callable[[int, int, str], float]
"""Seconds of a task by (stage, chunk, kind), or by kind if all stages are equal."""

Transfer = float | Callable[[int, int, str], float]
"""Seconds to send the result of a task, by (from part, to part, kind); between parts on one stage 0."""

Key = tuple[int, int, str]
Times = Mapping[Key, float]
Run = tuple[dict[Task, float], dict[Task, float], float]
"""Start and end of each task, and the end of all."""


@dataclass(frozen=True, kw_only=True)
class SimulatedTimes:
    """The times of a table's tasks; see `simulate`.

    Args:
      makespan: seconds from the first start to the last end.
      bubble: the fraction of the stages' time in which they wait: 1 - work / (stages * makespan).
      start: seconds at which each task begins.
      end: seconds at which each task ends.
      live: for each stage, the largest number of (chunk, microbatch) that it keeps at once.
    """

    makespan: float
    bubble: float
    start: Mapping[Task, float]
    end: Mapping[Task, float]
    live: tuple[int, ...]


def simulate(table: Table, seconds: Seconds, transfer_seconds: Transfer = 0.0) -> SimulatedTimes:
    """Simulate a table, given the seconds of its tasks and transfers.

    Each stage does its tasks in order, each as soon as its inputs have arrived; sending takes no time of the
    sender. In lock-step a tick begins when all stages have ended the previous one; it lasts as long as the
    work of its busiest stage plus its longest transfer.

    Args:
      table: one that `check` accepts.
      seconds: the duration of each task, 0 or more.
      transfer_seconds: one number, or a function (from part, to part, kind) -> seconds.

    Returns:
      The start and end of each task, makespan, bubble and live inputs.

    Raises:
      ValueError: lists every stage, chunk and kind that has no time or a negative one.

    >>> from shardtrain.pipeline.schedule import make_table
    >>> found = simulate(make_table("1f1b", 4, 8), {"forward": 1.0, "backward": 2.0})
    >>> found.makespan, round(found.bubble, 3)
    (33.0, 0.273)
    """
    work, hops = _times(table, seconds, transfer_seconds)
    start, end, makespan = (_simulate_in_lockstep if table.lockstep else _simulate_by_arrival)(
        table, work, hops
    )
    # the bubble is the fraction of the stages' time in which they do not work
    busy = sum(work[_key(task)] for task in table.tasks)
    return SimulatedTimes(
        makespan=makespan,
        bubble=1 - busy / (table.num_stages * makespan) if makespan else 0.0,
        start=start,
        end=end,
        live=tuple(table.live(stage) for stage in range(table.num_stages)),
    )


def _key(task: Task) -> Key:
    return task.stage, task.chunk, task.kind


def _times(table: Table, seconds: Seconds, transfer: Transfer) -> tuple[Times, Times]:
    """Return the seconds of work, and of sending the result, of each (stage, chunk, kind)."""
    chunks = [(stage, chunk) for stage in range(table.num_stages) for chunk in range(table.num_chunks)]
    keys = [(*chunk, kind) for chunk in chunks for kind in table.kinds]
    work = {key: _work_seconds(seconds, key) for key in keys}
    hops = {key: hop_seconds(table, transfer, key) for key in keys}
    problems = [
        f"{what} of stage {key[0]}, chunk {key[1]}, kind {key[2]!r} takes {found} s; give a number from 0"
        for what, times in (("work", work), ("transfer", hops))
        for key, found in times.items()
        if not 0 <= found < math.inf
    ]
    refuse(f"schedule {table.name!r} cannot be simulated", problems)
    return work, hops


def _work_seconds(seconds: Seconds, key: Key) -> float:
    """Return the seconds of a task; NaN if they are not given."""
    if not isinstance(seconds, Mapping):
        return seconds(*key)
    times: Mapping[Any, float] = seconds
    return times.get(key, times.get(key[2], math.nan))


def hop_seconds(table: Table, transfer: Transfer, key: Key) -> float:
    """Return the seconds to send a result: of a forward to the next part, of a backward to the previous one.

    Args:
      table: the schedule.
      transfer: as in `simulate`.
      key: (stage, chunk, kind) of the task whose result is sent.
    """
    stage, chunk, kind = key
    placement = table.part_placement
    part = placement.part(stage, chunk)
    to = {"forward": part + 1, "backward": part - 1}.get(kind, part)
    if not 0 <= to < table.num_parts or placement.stage(to) == stage:
        return 0.0
    return transfer(part, to, kind) if callable(transfer) else transfer


def _simulate_by_arrival(table: Table, work: Times, hops: Times) -> Run:
    """Start each task when its stage is free and its inputs have arrived; ticks give only the order."""
    start: dict[Task, float] = {}
    end: dict[Task, float] = {}
    made: dict[tuple[str, int, int], Task] = {}
    free = [0.0] * table.num_stages
    # the tasks are sorted by tick, so everything that a task needs was visited before it
    for task in table.tasks:
        inputs = [made[*need, task.microbatch] for need in list_needs(table, task)]
        # a result of another stage arrives after its transfer; one of this stage is there at its end
        arrivals = [end[i] + hops[_key(i)] * (i.stage != task.stage) for i in inputs]
        start[task] = max([free[task.stage], *arrivals])
        end[task] = free[task.stage] = start[task] + work[_key(task)]
        made[task.kind, table.part(task), task.microbatch] = task
    return start, end, max(end.values(), default=0.0)


def _simulate_in_lockstep(table: Table, work: Times, hops: Times) -> Run:
    start: dict[Task, float] = {}
    end: dict[Task, float] = {}
    begin = 0.0
    # a tick lasts as long as its busiest stage, then as its longest transfer
    for _, group in groupby(table.tasks, key=lambda task: task.tick):
        free, sending = [begin] * table.num_stages, 0.0
        # the tasks of one stage in a tick run one after the other
        for task in group:
            start[task] = free[task.stage]
            end[task] = free[task.stage] = start[task] + work[_key(task)]
            sending = max(sending, hops[_key(task)])
        begin = max(free) + sending
    return start, end, begin
