"""The error in the log of a rank: its last traceback, its message of a user's mistake, or its last lines."""

import re
from collections.abc import Sequence

ABORT = re.compile(r"called MPI_Abort\([^,]*, (\d+)\)|MPI_ABORT was invoked")
TRACEBACK = "Traceback (most recent call last)"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
AFTERWARDS = re.compile(
    r"application called MPI_Abort|Abort\(\d+\) on node|MPI_ABORT was invoked|Exception ignored in|[-=]{20}"
)
MOST_LINES, FIRST_LINES, TAIL_LINES = 60, 8, 15
MISTAKE = re.compile(r"shardtrain[.\w]*( \w+)?: ")
MISTAKE_END = re.compile(r"\(the traceback: SHARDTRAIN_TRACEBACK=1\)$")
"""First and last line of the message of a user's mistake, see `cli.main`."""

HANG, HANG_END = re.compile(r"shardtrain watchdog: "), re.compile(r"\(stacks of the ranks ")
"""First and last line of a watchdog's diagnosis, see `islands/watchdog/watchdog.py`."""


def error_text(log: str) -> str:
    """Return the error in a log: its last chain of tracebacks, the message of a mistake, or its last lines.

    >>> print(error_text("step 1\\nTraceback (most recent call last):\\n  File ...\\nValueError: no\\n"))
    Traceback (most recent call last):
      File ...
    ValueError: no
    """
    # a progress bar is redrawn in one line: take its last state
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in log.rstrip("\n").split("\n")]
    if hang := _between(lines, HANG, HANG_END):
        return "\n".join(hang)
    starts = [i for i, line in enumerate(lines) if TRACEBACK in line and not _ignored(lines, i)]
    if not starts:
        return "\n".join(_mistake(lines) or lines[-TAIL_LINES:]).strip("\n") or "(its log is empty)"
    start = starts.pop()
    while starts and any(line.startswith(CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    text = lines[start:]
    end = next((i for i, line in enumerate(text) if AFTERWARDS.search(line)), len(text))
    text = text[:end]
    if len(text) > MOST_LINES:
        cut = len(text) - MOST_LINES
        text[FIRST_LINES : FIRST_LINES + cut] = [f"  ... {cut} lines, see the log ..."]
    return "\n".join(text).rstrip()


def _mistake(lines: Sequence[str]) -> list[str]:
    """Return the message of a user's mistake, without the lines that libraries print after it."""
    return _between(lines, MISTAKE, MISTAKE_END)


def _between(lines: Sequence[str], first: re.Pattern, last: re.Pattern) -> list[str]:
    """Return the last block of lines that starts and ends with these patterns."""
    ends = [i for i, line in enumerate(lines) if last.match(line)]
    starts = [i for i, line in enumerate(lines[: ends[-1]]) if first.match(line)] if ends else []
    return list(lines[starts[-1] : ends[-1] + 1]) if starts else []


def _ignored(lines: Sequence[str], index: int) -> bool:
    return index > 0 and lines[index - 1].startswith("Exception ignored in")
