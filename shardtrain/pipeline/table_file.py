"""Tables as CSV files: a user's own schedule, or one of ours to look at and change. No jax."""

import csv
from collections.abc import Iterable
from pathlib import Path

from shardtrain.layout import near, problems_error
from shardtrain.pipeline.check import check
from shardtrain.pipeline.table import KINDS, Table, Task

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
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header, rows = tuple(reader.fieldnames or ()), [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ValueError(f"there is no schedule file {path} to read: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    problems = [f"column {near(name, COLUMNS)}" for name in header if name not in COLUMNS]
    problems += [f"column {name!r} is missing" for name in COLUMNS if name not in header and name != "chunk"]
    if not problems:
        problems = [p for line, row in rows for p in _row_problems(line, row)]
    if not problems and not rows:
        problems = ["it has no tasks; write one a line, as 0,0,0,0,forward"]
    if problems:
        raise problems_error(f"schedule file {path} cannot be read", problems)
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


def _row_problems(line: int, row: dict[str, str | None]) -> list[str]:
    if None in row or None in row.values():
        return [f"line {line} has more or fewer cells than the header"]
    problems = [
        f"line {line}: {name} is {text!r}; write a whole number from 0"
        for name, text in row.items()
        if name != "kind" and not (text or "").strip().isdecimal()
    ]
    kind = (row["kind"] or "").strip()
    return problems + ([] if kind in KINDS else [f"line {line}: kind {near(kind, KINDS)}"])


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
