"""Build schedules: order the tasks of each stage, and assign ticks to them. No jax.

`assign_earliest` assigns ticks to an order; `assign_lockstep` makes ticks directly. Next: `schedule.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from shardtrain.errors.messages import refuse
from shardtrain.pipeline.table import KINDS, Table, Task, list_needs

Step = tuple[str, int, int]
"""Kind, chunk and microbatch: a task without a tick."""


def list_units(table: Table) -> Iterator[tuple[int, int, int]]:
    """Yield unit, chunk and microbatch, depth first: groups of S microbatches pass chunk after chunk.

    Units are numbered for the next multiple of S; units of microbatches beyond M are left out.
    """
    # the last group may be incomplete: number its missing microbatches too, and leave them out below
    num_groups = -(-table.num_microbatches // table.num_stages)
    for unit in range(num_groups * table.num_parts):
        group, rest = divmod(unit, table.num_parts)
        chunk, index = divmod(rest, table.num_stages)
        if group * table.num_stages + index < table.num_microbatches:
            yield unit, chunk, group * table.num_stages + index


def list_forwards(table: Table) -> Iterator[Step]:
    """Return the forwards of any stage in the order of units."""
    return (("forward", chunk, microbatch) for _, chunk, microbatch in list_units(table))


def list_backwards(table: Table) -> Iterator[Step]:
    """Return the backwards of any stage in the order of units, chunks reversed."""
    last = table.num_chunks - 1
    return (("backward", last - chunk, microbatch) for _, chunk, microbatch in list_units(table))


def alternate(table: Table, ahead: Iterable[int]) -> list[list[Step]]:
    """Return the order of each stage: some forwards, then a forward and a backward in turn, then the rest.

    Args:
      table: a table with the sizes.
      ahead: for each stage, the number of forwards before the first pair.
    """
    # build the order for whole groups, then drop the microbatches beyond M: all stages drop the same
    whole = -(-table.num_microbatches // table.num_stages) * table.num_stages
    full = replace(table, num_microbatches=whole)
    begin, end = list(list_forwards(full)), list(list_backwards(full))
    orders = []
    for num_ahead in ahead:
        # steady state: after the forwards of the warm-up each forward is followed by a backward
        pairs = chain.from_iterable(zip(begin[num_ahead:], end, strict=False))
        num_pairs = max(0, len(begin) - num_ahead)
        # cool-down: the backwards for which no forward is left
        steps = [*begin[:num_ahead], *pairs, *end[num_pairs:]]
        orders.append([step for step in steps if step[2] < table.num_microbatches])
    return orders


def order_zero_bubble(table: Table, stage: int) -> list[Step]:
    """Return the order of a stage in ZB-H1: 1F1B, and a weight task after each backward, `stage` late."""
    end = table.num_microbatches
    # warm-up: as many forwards as in 1F1B
    ahead = min(end, table.num_stages - stage)
    order: list[Step] = [("forward", 0, index) for index in range(ahead)]
    for index in range(end):
        # steady state: a backward, the weight task of an earlier one, the next forward
        order.append(("backward", 0, index))
        if index >= stage:
            order.append(("weight", 0, index - stage))
        if index + ahead < end:
            order.append(("forward", 0, index + ahead))
    # the weight tasks that are left fill the end, where 1F1B waits
    return [*order, *(("weight", 0, index) for index in range(max(0, end - stage), end))]


def order_zero_bubble_v(table: Table, stage: int) -> list[Step]:
    """Return the order of a stage in ZB-V.

    It is the order for at least 2 S - 1 microbatches, which fill the pipeline, without those beyond M.
    """
    stages = table.num_stages
    end = max(table.num_microbatches, 2 * stages - 1)
    steps: list[Step] = []
    done = dict.fromkeys([(kind, chunk) for kind in KINDS for chunk in (0, 1)], 0)

    def add(chunk: int, *kinds: str) -> None:
        for kind in kinds:
            steps.append((kind, chunk, done[kind, chunk]))
            done[kind, chunk] += 1

    # Warm-up: forwards of chunk 0, until the first microbatch has come back up to this stage; then both
    # chunks in turn, until its backward comes down.
    for _ in range(2 * (stages - stage) - 1):
        add(0, "forward")
    for _ in range(stage):
        add(1, "forward")
        add(0, "forward")
    for _ in range(stages - stage):
        add(1, "forward", "backward", "weight")
    # Steady state: all six tasks of a microbatch, each chunk with its own microbatch.
    while done["forward", 1] < end:
        if done["forward", 0] < end:
            add(0, "forward")
        add(0, "backward", "weight")
        add(1, "forward", "backward", "weight")
    # Cool-down: backwards first, for other stages wait for them; weight tasks fill the end.
    for _ in range(stage):
        add(0, "backward")
        add(1, "backward")
    for _ in range(stages - stage):
        add(0, "backward", "weight")
    for chunk in (1, 0):
        while done["weight", chunk] < end:
            add(chunk, "weight")
    return [step for step in steps if step[2] < table.num_microbatches]


def assign_lockstep(table: Table, turn: int) -> Table:
    """Assign lock-step ticks in the placement "loop".

    The forward of unit u is on stage s in tick u + s; its backward on the last stage in tick u + `turn`, and
    a tick later on each stage before. Backwards pass the chunks in reverse. The weight tasks of a unit are on
    all stages in the same tick, so that they lengthen only one.
    """
    tasks = []
    for unit, chunk, microbatch in list_units(table):
        # the tick of this unit's last backward, on stage 0
        end = unit + turn + table.num_stages - 1
        for stage in range(table.num_stages):
            back = (stage, table.num_chunks - 1 - chunk, microbatch)
            tasks.append(Task(unit + stage, stage, chunk, microbatch, "forward"))
            tasks.append(Task(end - stage, *back, "backward"))
            tasks.append(Task(end, *back, "weight"))
    return replace(table, tasks=tuple(task for task in tasks if task.kind in table.kinds))


def assign_v_lockstep(table: Table) -> Table:
    """Assign lock-step ticks to the tasks of a table in the placement "v" with two chunks.

    The forward of part p and microbatch m is in tick 2 m + p, and its backward in tick 2 m + 2 (P - 1) - p,
    for P parts. Parts of one stage differ by an odd number, so their ticks are never the same. The weight
    tasks of a chunk are on all stages in the same tick, which they lengthen only once: those of chunk 0 in
    even ticks once its last backward is done, those of chunk 1 in odd ones.
    """
    placement, turn = table.part_placement, 2 * (table.num_parts - 1)
    after = turn - table.num_stages
    # the tick of the weight tasks of microbatch 0, for each chunk
    weight = (turn, after + (after + 1) % 2)
    tasks = []
    for microbatch in range(table.num_microbatches):
        for part in range(table.num_parts):
            at = (placement.stage(part), placement.chunk(part), microbatch)
            start = 2 * microbatch
            tasks.append(Task(start + part, *at, "forward"))
            tasks.append(Task(start + turn - part, *at, "backward"))
            tasks.append(Task(start + weight[placement.chunk(part)], *at, "weight"))
    return replace(table, tasks=tuple(task for task in tasks if task.kind in table.kinds))


def assign_earliest(table: Table, orders: Sequence[Sequence[Step]]) -> Table:
    """Assign to the steps of each stage, in order, the first ticks in which their inputs are available."""
    # the steps that each stage has still to do, the next one last
    rests = [list(reversed(order)) for order in orders]
    done: set[tuple[str, int, int]] = set()
    tasks: list[Task] = []
    tick = 0
    while any(rests):
        placed = []
        # a stage does its next step if an earlier tick computed its inputs; else it waits for a tick
        for stage, rest in enumerate(rests):
            kind, chunk, microbatch = rest[-1] if rest else ("", 0, 0)
            task = Task(tick, stage, chunk, microbatch, kind)
            if rest and all((*need, microbatch) in done for need in list_needs(table, task)):
                placed.append(task)
                rest.pop()
        assert placed, f"{table.name}: the orders of the stages wait for each other"
        # only now: what a tick computes can be used from the next one on
        done |= {(task.kind, table.part(task), task.microbatch) for task in placed}
        tasks += placed
        tick += 1
    return replace(table, tasks=tuple(tasks))


def make_empty_table(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    lockstep: bool,
    kinds: tuple[str, ...] = KINDS[:2],
    *,
    live: Callable[[int], int],
    least_chunks: int = 1,
    most_chunks: int | None = None,
    placement: str = "loop",
) -> Table:
    """Return a table without tasks, after checking that the schedule supports its sizes.

    Args:
      name: the name of the schedule.
      num_stages: S.
      num_microbatches: M.
      num_chunks: V.
      lockstep: the form, see `Table`.
      kinds: the kinds of tasks.
      live: stage -> largest number of (chunk, microbatch) that it may keep at once.
      least_chunks: the smallest V of the schedule.
      most_chunks: the largest V; None means no limit.
      placement: the placement of the parts on the stages.

    Raises:
      ValueError: lists every size that the schedule does not support.
    """
    # collect all problems, so that one error lists every size to change
    sizes = {"stages": num_stages, "microbatches": num_microbatches}
    problems = [f"{what} is {size}; use 1 or more" for what, size in sizes.items() if size < 1]
    if num_chunks < least_chunks:
        instead = ", or the schedule '1f1b'" if least_chunks > 1 else ""
        more = "" if most_chunks == least_chunks else " or more"
        problems.append(f"chunks (virtual stages) is {num_chunks}; use {least_chunks}{more}{instead}")
    if most_chunks is not None and num_chunks > most_chunks:
        problems.append(
            f"chunks (virtual stages) is {num_chunks}; use {most_chunks}, or the schedule 'interleaved'"
        )
    refuse(f"schedule {name!r} cannot be made", problems)
    return Table(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        lockstep=lockstep,
        placement=placement,
        tasks=(),
        name=name,
        kinds=kinds,
        # no stage can keep more than all inputs of its parts
        live_bound=tuple(min(num_chunks * num_microbatches, live(stage)) for stage in range(num_stages)),
    )
