"""Format the table of `shardtrain doctor`: finding, status and fix of each row, and a summary line."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardtrain.doctor.check import Row
from shardtrain.system.terminal import printable

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "bold red"}
"""Status -> rich style."""

HEADER = ("check", "finding", "status", "what to do")


def doctor_table(rows: Sequence[Row], seconds: Mapping[str, float]) -> Group:
    """Return the table of all rows and the summary, for a rich console.

    Args:
      rows: the rows of all checks.
      seconds: check -> its duration.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for name, share in zip(HEADER, (None, 3, None, 3), strict=True):
        table.add_column(name, ratio=share, overflow="fold", no_wrap=share is None)
    last = None
    for row in rows:
        if last not in (None, row.check):
            table.add_section()
        last = row.check
        cells = (
            Text(f"{row.check}: {row.item}"),
            Text(printable(row.finding)),
            Text(row.status, style=STYLES[row.status]),
            Text(row.fix),
        )
        table.add_row(*cells)
    return Group(table, Text(summary([row.status for row in rows])), Text(times_text(seconds)))


def summary(statuses: Sequence[str]) -> str:
    """Format the number of rows of each status, the worst first.

    >>> summary(["ok", "warning", "ok"]), summary(["ok"]), summary(["wrong", "wrong"])
    ('1 warning, 2 ok', 'nothing is wrong: 1 ok', '2 wrong')
    """
    counts = Counter(statuses)
    text = ", ".join(f"{counts[status]} {status}" for status in reversed(STYLES) if counts[status])
    return text if counts["wrong"] or counts["warning"] else f"nothing is wrong: {text}"


def times_text(seconds: Mapping[str, float]) -> str:
    """Format the durations of the checks.

    >>> times_text({"names": 0.04, "mpi": 2.31})
    'took 2.4 s: names 0.0, mpi 2.3'
    """
    parts = ", ".join(f"{name} {time:.1f}" for name, time in seconds.items())
    return f"took {sum(seconds.values()):.1f} s: {parts}"
