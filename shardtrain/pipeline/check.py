"""Check that a table can run: every task once, in its own tick, after its dependencies. No jax."""

from collections import Counter
from collections.abc import Sequence

from shardtrain.errors.messages import near, problems_error
from shardtrain.pipeline.part_placement import placement_problem
from shardtrain.pipeline.table import KINDS, Table, Task, needs


def check(table: Table) -> None:
    """Raise an error that lists everything because of which a table cannot run.

    Args:
      table: any table; it need not be checked yet.

    Raises:
      ValueError: lists every task that is missing, duplicate, out of range, in the tick of another or before
        a dependency, and every stage that keeps more than `table.live_bound`.

    >>> check(Table(num_stages=1, num_microbatches=1, tasks=(Task(0, 0, 0, 0, "forward"),), name="mine"))
    """
    problems = [*_size_problems(table)]
    if not problems:
        outside = [problem for task in table.tasks for problem in _range_problems(table, task)]
        problems = [*outside, *_count_problems(table), *_tick_problems(table), *_order_problems(table)]
    if not problems and table.live_bound is not None:
        problems = _live_problems(table, table.live_bound)
    if problems:
        raise problems_error(f"schedule {table.name!r} cannot run", problems)


def _text(task: Task, num_chunks: int) -> str:
    chunk = f" of chunk {task.chunk}" if num_chunks > 1 else ""
    return f"the {task.kind}{chunk} of microbatch {task.microbatch} on stage {task.stage}"


def _size_problems(table: Table) -> list[str]:
    sizes = {"stages": table.num_stages, "microbatches": table.num_microbatches, "chunks": table.num_chunks}
    problems = [f"{what} is {size}; use 1 or more" for what, size in sizes.items() if size < 1]
    problems += [f"kind {near(kind, KINDS)}" for kind in table.kinds if kind not in KINDS]
    if "forward" not in table.kinds or ("weight" in table.kinds and "backward" not in table.kinds):
        problems.append(
            f"its kinds are {list(table.kinds)}; use ['forward'], ['forward', 'backward'] or all three"
        )
    if problem := placement_problem(table.placement, table.num_chunks):
        problems.append(problem)
    return problems


def _range_problems(table: Table, task: Task) -> list[str]:
    """Return one problem for each field of a task that is out of range."""
    ends = {"stage": table.num_stages, "chunk": table.num_chunks, "microbatch": table.num_microbatches}
    where = f"in tick {task.tick}, {_text(task, table.num_chunks)}"
    problems = [
        f"{where}: {what} is {getattr(task, what)}; there are {end}, 0 to {end - 1}"
        for what, end in ends.items()
        if not 0 <= getattr(task, what) < end
    ]
    problems += [f"{where}: tick is below 0; the first is 0"] if task.tick < 0 else []
    return problems + ([] if task.kind in table.kinds else [f"{where}: kind {near(task.kind, table.kinds)}"])


def _count_problems(table: Table) -> list[str]:
    counts = Counter(task[1:] for task in table.tasks)
    wanted = [
        Task(0, stage, chunk, microbatch, kind)
        for stage in range(table.num_stages)
        for chunk in range(table.num_chunks)
        for microbatch in range(table.num_microbatches)
        for kind in table.kinds
    ]
    missing = [
        f"{_text(task, table.num_chunks)} is missing; add it" for task in wanted if not counts[task[1:]]
    ]
    return missing + [
        f"{_text(Task(0, *rest), table.num_chunks)} occurs {count} times; remove {count - 1}"
        for rest, count in counts.items()
        if count > 1
    ]


def _tick_problems(table: Table) -> list[str]:
    """Return one problem for each tick in which a stage has too many tasks."""
    if table.lockstep:
        counts = Counter((task.tick, task.stage, task.kind) for task in table.tasks)
        what, limit = "{} tasks of kind {!r}", "one of each kind in a lock-step tick"
    else:
        counts = Counter((task.tick, task.stage, "") for task in table.tasks)
        what, limit = "{} tasks", "one, or read the table as lock-step"
    return [
        f"tick {tick} of stage {stage} has {what.format(count, kind)}; allowed: {limit}"
        for (tick, stage, kind), count in counts.items()
        if count > 1
    ]


def _order_problems(table: Table) -> list[str]:
    """Return one problem for each task before a dependency; `_count_problems` reports missing ones."""
    tasks = [
        task
        for task in table.tasks
        if 0 <= task.stage < table.num_stages and 0 <= task.chunk < table.num_chunks
    ]
    ticks = {(task.kind, table.part(task), task.microbatch): task.tick for task in tasks}
    problems = []
    for task in tasks:
        for kind, part in needs(table, task):
            made = ticks.get((kind, part, task.microbatch))
            same_tick = table.lockstep and part == table.part(task)
            if made is None or made < task.tick or (same_tick and made == task.tick):
                continue
            stage, chunk = table.part_placement.stage(part), table.part_placement.chunk(part)
            source = _text(Task(made, stage, chunk, task.microbatch, kind), table.num_chunks)
            problems.append(
                f"{_text(task, table.num_chunks)} is in tick {task.tick}, but needs {source},"
                f" which is in tick {made}; move it to tick {made + (not same_tick)} or later"
            )
    return problems


def _live_problems(table: Table, live_bound: Sequence[int]) -> list[str]:
    problems = []
    for stage, bound in enumerate(live_bound):
        live = table.live(stage)
        if live > bound:
            first = f"the {table.kinds[-1]} of the first"
            problems.append(
                f"stage {stage} holds {live} microbatches at once, its bound is {bound};"
                f" do {first} before forward {bound + 1}"
            )
    return problems
