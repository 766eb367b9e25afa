"""The table of doctor: findings, verdicts and fixes, and a summary line."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from shardtrain.system.terminal import printable

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "bold red"}
"""Verdict -> rich style."""

HEADER = ("check", "found", "verdict", "what to do")


def doctor_table(rows: Sequence[tuple[str, str, str, str, str]], seconds: Mapping[str, float]) -> Group:
    """Return the table of all rows and the summary, for a rich console.

    Args:
      rows: (check, part of the check, finding, verdict, fix).
      seconds: check -> its duration.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for name, share in zip(HEADER, (None, 3, None, 3), strict=True):
        table.add_column(name, ratio=share, overflow="fold", no_wrap=share is None)
    last = None
    for check, what, found, verdict, do in rows:
        if last not in (None, check):
            table.add_section()
        last = check
        cells = (
            Text(f"{check}: {what}"),
            Text(printable(found)),
            Text(verdict, style=STYLES[verdict]),
            Text(do),
        )
        table.add_row(*cells)
    return Group(table, Text(summary([row[3] for row in rows])), Text(times_text(seconds)))


def summary(verdicts: Sequence[str]) -> str:
    """Format the number of rows of each verdict, the worst first.

    >>> summary(["ok", "warning", "ok"]), summary(["ok"]), summary(["wrong", "wrong"])
    ('1 warning, 2 ok', 'nothing is wrong: 1 ok', '2 wrong')
    """
    counts = Counter(verdicts)
    text = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(STYLES) if counts[verdict])
    return text if counts["wrong"] or counts["warning"] else f"nothing is wrong: {text}"


def times_text(seconds: Mapping[str, float]) -> str:
    """Format the durations of the checks.

    >>> times_text({"names": 0.04, "mpi": 2.31})
    'took 2.4 s: names 0.0, mpi 2.3'
    """
    parts = ", ".join(f"{name} {time:.1f}" for name, time in seconds.items())
    return f"took {sum(seconds.values()):.1f} s: {parts}"


def doctor_text(
    rows: Sequence[tuple[str, str, str, str, str]], seconds: Mapping[str, float], width: int = 140
) -> str:
    """Return the table as text, without colours."""
    import io

    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(doctor_table(rows, seconds))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
