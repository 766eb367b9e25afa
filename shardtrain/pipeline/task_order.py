"""In which order stages do their tasks, and when: what the schedules are built from. No jax.

An order has no ticks: `earliest` gives it those, `in_lockstep` computes them. Next: `schedule.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from shardtrain.pipeline.table import Table, Task, needs

Step = tuple[str, int, int]
"""Kind, chunk and microbatch: a task that has no tick yet."""


def units(table: Table) -> Iterator[tuple[int, int, int]]:
    """Unit, chunk and microbatch, depth first: groups of S microbatches pass chunk after chunk.

    Units are counted as for the next multiple of S; those of microbatches that are not there are left out.
    """
    num_groups = -(-table.num_microbatches // table.num_stages)
    for unit in range(num_groups * table.num_parts):
        group, rest = divmod(unit, table.num_parts)
        chunk, index = divmod(rest, table.num_stages)
        if group * table.num_stages + index < table.num_microbatches:
            yield unit, chunk, group * table.num_stages + index


def forwards(table: Table) -> Iterator[Step]:
    """The forwards of any stage in the order of units."""
    return (("forward", chunk, microbatch) for _, chunk, microbatch in units(table))


def backwards(table: Table) -> Iterator[Step]:
    """The backwards of any stage in the order of units, which pass the chunks in reverse."""
    last = table.num_chunks - 1
    return (("backward", last - chunk, microbatch) for _, chunk, microbatch in units(table))


def alternating(table: Table, ahead: Iterable[int]) -> list[list[Step]]:
    """For each stage: so many forwards ahead, then a forward and a backward in turn, then what is left."""
    whole = -(-table.num_microbatches // table.num_stages) * table.num_stages
    full = replace(table, num_microbatches=whole)
    begin, end = list(forwards(full)), list(backwards(full))
    orders = []
    for num_ahead in ahead:
        pairs = chain.from_iterable(zip(begin[num_ahead:], end, strict=False))
        num_pairs = max(0, len(begin) - num_ahead)
        steps = [*begin[:num_ahead], *pairs, *end[num_pairs:]]
        orders.append([step for step in steps if step[2] < table.num_microbatches])
    return orders


def zero_bubble_order(table: Table, stage: int) -> list[Step]:
    """As 1F1B, with a weight task from the backward of number `stage` on; the late ones at the end."""
    end = table.num_microbatches
    ahead = min(end, table.num_stages - stage)
    order: list[Step] = [("forward", 0, index) for index in range(ahead)]
    for index in range(end):
        order.append(("backward", 0, index))
        if index >= stage:
            order.append(("weight", 0, index - stage))
        if index + ahead < end:
            order.append(("forward", 0, index + ahead))
    return [*order, *(("weight", 0, index) for index in range(max(0, end - stage), end))]


def in_lockstep(table: Table, turn: int) -> Table:
    """Unit u: forward on stage s in tick u + s, backward on the last stage in tick u + `turn`, then upwards.

    Backwards pass the chunks in reverse. The weight tasks of a unit are on all stages in the same tick: there
    they lengthen it once.
    """
    tasks = []
    for unit, chunk, microbatch in units(table):
        end = unit + turn + table.num_stages - 1
        for stage in range(table.num_stages):
            back = (stage, table.num_chunks - 1 - chunk, microbatch)
            tasks.append(Task(unit + stage, stage, chunk, microbatch, "forward"))
            tasks.append(Task(end - stage, *back, "backward"))
            tasks.append(Task(end, *back, "weight"))
    return replace(table, tasks=tuple(task for task in tasks if task.kind in table.kinds))


def earliest(table: Table, orders: Sequence[Sequence[Step]]) -> Table:
    """Each stage's steps in their order, each in the first tick in which what it needs is there."""
    rests = [list(reversed(order)) for order in orders]
    done: set[tuple[str, int, int]] = set()
    tasks: list[Task] = []
    tick = 0
    while any(rests):
        placed = []
        for stage, rest in enumerate(rests):
            kind, chunk, microbatch = rest[-1] if rest else ("", 0, 0)
            task = Task(tick, stage, chunk, microbatch, kind)
            if rest and all((*need, microbatch) in done for need in needs(table, task)):
                placed.append(task)
                rest.pop()
        assert placed, f"{table.name}: the orders of the stages wait for each other"
        # only now: what a tick makes is there from the next one on
        done |= {(task.kind, table.part(task), task.microbatch) for task in placed}
        tasks += placed
        tick += 1
    return replace(table, tasks=tuple(tasks))
