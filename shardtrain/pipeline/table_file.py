"""Read and write schedule tables as CSV files. No jax."""

import csv
import io
import re
from pathlib import Path
from typing import Any

from shardtrain.errors.messages import near, refuse
from shardtrain.pipeline.part_placement import list_placements
from shardtrain.pipeline.table import KINDS, Table, Task, check
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.excerpts import short
from shardtrain.system.plain_text import read_csv
from shardtrain.system.untrusted_files import read_text

MOST_FILE_BYTES = 1 << 25
MOST_PROBLEMS = 100
IDLE = 8
"""Largest accepted ratio of a tick, stage, chunk or microbatch number to the number of tasks."""

COLUMNS = ("tick", "stage", "chunk", "microbatch", "kind")
OPTIONAL = ("chunk", "part")
"""Columns that a file may leave out; without `part`, parts are placed round-robin ("loop")."""


def read_table(path: Path | str, *, lockstep: bool = False) -> Table:
    """Read a table from a CSV file with the columns of `COLUMNS`; the chunk may be left out.

    The tasks determine the numbers of stages, microbatches and chunks. A column `part` has the part of the
    model of each (stage, chunk); without it, the placement is "loop". A table of one task per stage and tick
    can also run in lock-step.

    Args:
      path: the file; lines may be in any order.
      lockstep: how it will run, see `Table`.

    Returns:
      The checked table, with the placement of its parts.

    Raises:
      ValueError: there is no such file, or lists every column and line that cannot be read; or `check`
        refuses it.
    """
    try:
        header, rows = read_csv(read_text(Path(path), MOST_FILE_BYTES), skipinitialspace=True)
    except OSError as error:
        raise ValueError(f"there is no schedule file {path} to read: {error.strerror or error}") from error
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    # check columns, then cells, then sizes: each check relies on the one before
    known = dict.fromkeys((*COLUMNS, *OPTIONAL))
    problems = [f"column {near(name, known)}" for name in header if name not in known]
    problems += [f"column {name!r} is missing" for name in known if name not in (*header, *OPTIONAL)]
    if not problems:
        problems = [p for line, row in rows for p in _row_problems(line, row, len(rows))]
    if not problems and not rows:
        problems = ["it has no tasks; write one a line, as 0,0,0,0,forward"]
    if not problems:
        tasks = [row for _, row in rows]
        problems = _size_problems(tasks) or _part_problems(tasks)
    refuse(f"schedule file {path} cannot be read", problems, MOST_PROBLEMS)
    table = _parse_rows([row for _, row in rows], Path(path).name, lockstep)
    check(table)
    return table


def write_table(table: Table, path: Path | str) -> None:
    """Write a table as a CSV file that `read_table` reads, and create its folder.

    The column `part` is written if the placement is not the default.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    if table.placement == "loop":
        writer.writerows([COLUMNS, *table.tasks])
    else:
        writer.writerows([(*COLUMNS, "part"), *((*task, table.part(task)) for task in table.tasks)])
    replace_file(Path(path), text.getvalue().encode())


def _row_problems(line: int, row: dict[str, str | None], num_tasks: int) -> list[str]:
    if None in row or None in row.values():
        return [f"line {line} has more or fewer cells than the header"]
    problems = [
        f"line {line}: {name} is {short(text)}; write a whole number from 0"
        for name, text in row.items()
        if name != "kind" and not re.fullmatch("[0-9]+", (text or "").strip())
    ]
    # every stage, chunk, part and microbatch has a task, and ticks without any are of no use
    problems += [
        f"line {line}: {name} is {short(text)}, and the file has {num_tasks} tasks; write a number below"
        f" {num_tasks * IDLE}"
        for name, text in row.items()
        if name != "kind" and not problems and _parse_number(text, num_tasks * IDLE) >= num_tasks * IDLE
    ]
    kind = (row["kind"] or "").strip()
    return problems + ([] if kind in KINDS else [f"line {line}: kind {near(kind, KINDS)}"])


def _parse_number(text: str | None, limit: int) -> int:
    """Return a whole number, or the limit if it has too many digits to be read."""
    digits = (text or "").strip().lstrip("0")
    return limit if len(digits) > 18 else int(digits or 0)


def _size_problems(rows: list[dict[str, Any]]) -> list[str]:
    """Return a problem if the sizes are so large that most tasks would be missing.

    >>> _size_problems([{"tick": "0", "stage": "9", "microbatch": "9", "kind": "forward"}])
    ['its largest stage, chunk and microbatch are 9, 0 and 9: 10 * 1 * 10 = 100 tasks of each kind, and the \
file has 1 in all']
    """
    columns = ("stage", "chunk", "microbatch")
    largest = [max(int(row.get(name, "0")) for row in rows) for name in columns]
    stages, chunks, microbatches = (number + 1 for number in largest)
    needed = stages * chunks * microbatches
    if needed <= len(rows) * IDLE:
        return []
    return [
        f"its largest stage, chunk and microbatch are {largest[0]}, {largest[1]} and {largest[2]}:"
        f" {stages} * {chunks} * {microbatches} = {needed} tasks of each kind, and the"
        f" file has {len(rows)} in all"
    ]


def _find_placement(rows: list[dict[str, Any]]) -> str | None:
    """Return the name of the placement that the column `part` describes; None if there is none."""
    if "part" not in rows[0]:
        return "loop"
    found = {tuple(int(row.get(name, "0")) for name in ("stage", "chunk", "part")) for row in rows}
    fits = (
        placement.name
        for placement in list_placements(*_find_sizes(rows))
        if all(placement.part(stage, chunk) == part for stage, chunk, part in found)
    )
    return next(fits, None)


def _part_problems(rows: list[dict[str, Any]]) -> list[str]:
    if _find_placement(rows) is not None:
        return []
    known = list_placements(*_find_sizes(rows))
    stages = " or ".join(f"{','.join(map(str, each.stages))} ({each.name})" for each in known)
    return [f"its parts are not on the stages of a placement; put the parts 0, 1, ... on stages {stages}"]


def _find_sizes(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the numbers of stages and chunks."""
    stages, chunks = (1 + max(int(row.get(name, "0")) for row in rows) for name in ("stage", "chunk"))
    return stages, chunks


def _parse_rows(rows: list[dict[str, Any]], name: str, lockstep: bool) -> Table:
    tasks = tuple(
        Task(*(int(row.get(column, "0")) for column in COLUMNS[:-1]), kind=row["kind"].strip())
        for row in rows
    )
    num_stages, num_chunks = _find_sizes(rows)
    return Table(
        num_stages=num_stages,
        num_microbatches=1 + max(task.microbatch for task in tasks),
        num_chunks=num_chunks,
        placement=_find_placement(rows) or "loop",
        lockstep=lockstep,
        tasks=tasks,
        name=name,
    )
