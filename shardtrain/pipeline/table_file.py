"""Tables as CSV files: a user's own schedule, or one of ours to look at and change. No jax."""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardtrain.errors.messages import near, problems_error
from shardtrain.pipeline.check import check
from shardtrain.pipeline.table import KINDS, Table, Task
from shardtrain.system.untrusted_files import read_text, short

MOST_FILE_BYTES = 1 << 25
MOST_PROBLEMS = 100
IDLE = 8
"""Counts may be so many times larger than the number of tasks; beyond that they are a mistake."""

COLUMNS = ("tick", "stage", "chunk", "microbatch", "kind")


def read_table(path: Path | str, *, lockstep: bool = False) -> Table:
    """A table from a CSV file with the columns of `COLUMNS`; the chunk may be left out.

    Its numbers of stages, microbatches and chunks are what the tasks use. A table of one task a stage and
    tick is also one for lock-step.

    Args:
      path: the file; lines in any order.
      lockstep: how it will run, see `Table`.

    Raises:
      ValueError: no such file, or lists every column and line that cannot be read; or `check` refuses it.
    """
    try:
        text = read_text(Path(path), MOST_FILE_BYTES).removeprefix("\ufeff")
        reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
        header, rows = tuple(reader.fieldnames or ()), [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ValueError(f"there is no schedule file {path} to read: {error.strerror or error}") from error
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    problems = [f"column {near(name, COLUMNS)}" for name in header if name not in COLUMNS]
    problems += [f"column {name!r} is missing" for name in COLUMNS if name not in header and name != "chunk"]
    if not problems:
        problems = [p for line, row in rows for p in _row_problems(line, row, len(rows))]
    if not problems and not rows:
        problems = ["it has no tasks; write one a line, as 0,0,0,0,forward"]
    if not problems:
        problems = _size_problems([row for _, row in rows])
    if problems:
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
        raise problems_error(f"schedule file {path} cannot be read", problems[:MOST_PROBLEMS] + more)
    table = _from_rows([row for _, row in rows], Path(path).name, lockstep)
    check(table)
    return table


def write_table(table: Table, path: Path | str) -> None:
    """Write a table as a CSV file that `read_table` reads; its folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(table.tasks)


def _row_problems(line: int, row: dict[str, str | None], num_tasks: int) -> list[str]:
    if None in row or None in row.values():
        return [f"line {line} has more or fewer cells than the header"]
    problems = [
        f"line {line}: {name} is {short(text)}; write a whole number from 0"
        for name, text in row.items()
        if name != "kind" and not re.fullmatch("[0-9]+", (text or "").strip())
    ]
    # every stage, chunk and microbatch has a task, and a tick without any is of no use
    problems += [
        f"line {line}: {name} is {short(text)}, and the file has {num_tasks} tasks; write a number below"
        f" {num_tasks * IDLE}"
        for name, text in row.items()
        if name != "kind" and not problems and _number(text, num_tasks * IDLE) >= num_tasks * IDLE
    ]
    kind = (row["kind"] or "").strip()
    return problems + ([] if kind in KINDS else [f"line {line}: kind {near(kind, KINDS)}"])


def _number(text: str | None, limit: int) -> int:
    """A whole number, or the limit for one with too many digits to be read."""
    digits = (text or "").strip().lstrip("0")
    return limit if len(digits) > 18 else int(digits or 0)


def _size_problems(rows: list[dict[str, Any]]) -> list[str]:
    """Sizes of which most tasks would be missing: nobody counts up to them.

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


def _from_rows(rows: Iterable[dict[str, str]], name: str, lockstep: bool) -> Table:
    tasks = tuple(
        Task(*(int(row.get(column, "0")) for column in COLUMNS[:-1]), kind=row["kind"].strip())
        for row in rows
    )
    return Table(
        num_stages=1 + max(task.stage for task in tasks),
        num_microbatches=1 + max(task.microbatch for task in tasks),
        num_chunks=1 + max(task.chunk for task in tasks),
        lockstep=lockstep,
        tasks=tasks,
        name=name,
    )
