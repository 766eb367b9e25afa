"""Format the timeline of a pipeline schedule: a line per stage, a cell per tick, and the bubble.

`plots/timeline.py` plots it.
"""

from collections import defaultdict

from shardtrain.pipeline.simulate import SimulatedTimes, simulate
from shardtrain.pipeline.table import Table, Task

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
IDLE = "."


def unit_seconds(table: Table) -> dict[str, float]:
    """Return unit times by kind of task: forward 1, backward 2, or 1 for each half of a split backward."""
    return {"forward": 1.0, "backward": 1.0 if table.has_weight else 2.0, "weight": 1.0}


def simulate_units(table: Table) -> SimulatedTimes:
    """Simulate a table whose tasks take `unit_seconds`, with no time between stages."""
    return simulate(table, unit_seconds(table))


def task_text(task: Task, num_chunks: int = 1) -> str:
    """Format a task: kind, microbatch, and the chunk as a letter if there are several.

    >>> task_text(Task(5, 0, 1, 12, "backward"), num_chunks=2)
    'B12b'
    """
    # a letter, or a number after a dot if there are more than 26
    chunk = chr(ord("a") + task.chunk) if num_chunks <= 26 else f".{task.chunk}"
    return LETTERS[task.kind] + str(task.microbatch) + (chunk if num_chunks > 1 else "")


def timeline_text(table: Table, width: int | None = None) -> str:
    """Format the table of a schedule as text.

    Args:
      table: one that can run.
      width: columns of the terminal; ticks that do not fit are only counted. None shows all.

    Returns:
      Lines without trailing blanks, each with a newline.

    >>> from shardtrain.pipeline.schedule import make_table
    >>> print(timeline_text(make_table("1f1b", 2, 2)), end="")
    schedule 1f1b: 2 stages, 2 microbatches, one task a tick
    tick     0  1  2  3  4  5
    stage 0  F0 F1 .  B0 .  B1
    stage 1  .  F0 B0 F1 B1 .
    F forward, B backward, then the microbatch; . waits
    6 ticks; bubble 33.3% where F takes 1, B takes 2; live microbatches by stage: 2 1
    """
    cells = _cells(table)
    heads = ["tick", *(f"stage {stage}" for stage in range(table.num_stages))]
    head_width = max(map(len, heads)) + 2
    cell_width = max(len(text) for line in cells for text in line) + 1
    shown = table.num_ticks
    if width is not None:
        shown = min(shown, max(1, (width + 1 - head_width) // cell_width))
    lines = [
        head.ljust(head_width) + "".join(text.ljust(cell_width) for text in line[:shown])
        for head, line in zip(heads, cells, strict=True)
    ]
    if shown < table.num_ticks:
        num_tasks = _format_count(sum(task.tick >= shown for task in table.tasks), "task")
        lines.append(f"ticks {shown} to {table.num_ticks - 1} do not fit here: {num_tasks}")
    kinds = ", ".join(f"{LETTERS[kind]} {kind}" for kind in table.kinds)
    chunk = ", then the chunk (a, b, ...)" if table.num_chunks > 1 else ""
    lines = [heading(table), *lines, f"{kinds}, then the microbatch{chunk}; {IDLE} waits"]
    lines.append(figures(table, simulate_units(table)))
    return "".join(line.rstrip() + "\n" for line in lines)


def heading(table: Table) -> str:
    """Format name, sizes and form of a table in one line."""
    sizes = [
        _format_count(table.num_stages, "stage"),
        _format_count(table.num_microbatches, "microbatch"),
    ]
    sizes += [f"{table.num_chunks} chunks a stage"] if table.num_chunks > 1 else []
    form = "lock-step" if table.lockstep else "one task a tick"
    return f"schedule {table.name}: {', '.join([*sizes, form])}"


def figures(table: Table, found: SimulatedTimes) -> str:
    """Format ticks, bubble and live microbatches in one line.

    Args:
      table: one that can run.
      found: its simulation, from `simulate_units`.
    """
    what = "microbatches" if table.num_chunks == 1 else "(chunk, microbatch)"
    live = " ".join(map(str, found.live))
    ticks, seconds = _format_count(table.num_ticks, "tick"), unit_seconds(table)
    times = ", ".join(f"{LETTERS[kind]} takes {seconds[kind]:g}" for kind in table.kinds)
    return f"{ticks}; bubble {found.bubble:.1%} where {times}; live {what} by stage: {live}"


def _cells(table: Table) -> list[list[str]]:
    """Return the cells: a line of tick numbers, then one per stage."""
    texts: defaultdict[tuple[int, int], str] = defaultdict(str)
    for task in table.tasks:
        texts[task.stage, task.tick] += task_text(task, table.num_chunks)
    ticks = range(table.num_ticks)
    stages = [[texts.get((stage, tick), IDLE) for tick in ticks] for stage in range(table.num_stages)]
    return [[str(tick) for tick in ticks], *stages]


def _format_count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
