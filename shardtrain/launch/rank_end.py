"""Read how each rank of a launch ended, from the records and logs that `rank.py` wrote in the log folder."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.islands.watchdog.step_file import NOTHING, LastStep, read_step_file
from shardtrain.launch.rank import LOST, step_file_path

ABORT = re.compile(r"called MPI_Abort\([^,]*, (\d+)\)|MPI_ABORT was invoked")
TRACEBACK = "Traceback (most recent call last)"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
AFTERWARDS = re.compile(
    r"application called MPI_Abort|Abort\(\d+\) on node|MPI_ABORT was invoked|Exception ignored in|[-=]{20}"
)
MOST_LINES, FIRST_LINES, TAIL_LINES = 60, 8, 15
USAGE_ERROR = re.compile(r"shardtrain[.\w]*( \w+)?: ")
MISTAKE_END = re.compile(r"\(the traceback: SHARDTRAIN_TRACEBACK=1\)$")
"""First and last line of the message of a user's mistake, see `cli.main`."""

HANG, HANG_END = re.compile(r"shardtrain watchdog: "), re.compile(r"\(stacks of the ranks ")
"""First and last line of a watchdog's diagnosis, see `islands/watchdog/watchdog.py`."""


def error_text(log: str) -> str:
    """Find the error in a log: its last chain of tracebacks, the message of a mistake, or its last lines.

    >>> print(error_text("step 1\\nTraceback (most recent call last):\\n  File ...\\nValueError: no\\n"))
    Traceback (most recent call last):
      File ...
    ValueError: no
    """
    # a progress bar is redrawn in one line: take its last state
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in log.rstrip("\n").split("\n")]
    if hang := _find_block(lines, HANG, HANG_END):
        return "\n".join(hang)
    starts = [i for i, line in enumerate(lines) if TRACEBACK in line and not _is_ignored(lines, i)]
    if not starts:
        return (
            "\n".join(_find_block(lines, USAGE_ERROR, MISTAKE_END) or lines[-TAIL_LINES:]).strip("\n")
            or "(its log is empty)"
        )
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


def _find_block(lines: Sequence[str], first: re.Pattern, last: re.Pattern) -> list[str]:
    """Return the last block of lines that starts and ends with these patterns."""
    ends = [i for i, line in enumerate(lines) if last.match(line)]
    starts = [i for i, line in enumerate(lines[: ends[-1]]) if first.match(line)] if ends else []
    return list(lines[starts[-1] : ends[-1] + 1]) if starts else []


def _is_ignored(lines: Sequence[str], index: int) -> bool:
    return index > 0 and lines[index - 1].startswith("Exception ignored in")


CONSEQUENCE = re.compile(
    r"MPI_ERR_|mpi4py\.MPI\.Exception|internal_\w+: |Communication error with rank|PMIX|"
    r"[Cc]oordination service|heartbeat|Connection (reset|refused|closed)|Gloo|Broken pipe|\bMissing: "
)
"""Errors that a rank gets when another rank is lost; they count only without other errors."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Args:
      rank: its number.
      size: number of ranks.
      island, process, num_processes: its placement, see `RankPlacement`.
      host: the host on which it ran.
      start_seconds: time of its start, in seconds since the epoch by its host's clock.
      end_seconds: time of its end; None if the launcher killed it together with its keeper.
      code: its exit code; 128 + n for signal n; None if the launcher killed it together with its keeper.
      signal: the signal that ended it; None without one.
      asked: name of the signal that was forwarded to it; None without one.
      log: its log.
      text: the part of the log from this launch.
      touched_seconds: time of the last write to the log.
      last: its latest step, and whether its watchdog ended it.
      lost_seconds: time at which its keeper was lost; None if it was not.
      orphaned: whether its launcher died first.
      pid: process id of its keeper, the process that keeps its log.
    """

    rank: int
    size: int
    island: int
    process: int
    num_processes: int
    host: str
    start_seconds: float
    end_seconds: float | None
    code: int | None
    signal: int | None
    asked: str | None
    log: Path
    text: str
    touched_seconds: float
    last: LastStep = NOTHING
    lost_seconds: float | None = None
    orphaned: bool = False
    pid: int | None = None

    @property
    def name(self) -> str:
        """The name of the rank: `island 1`, or `island 1.0`."""
        process = f".{self.process}" if self.num_processes > 1 else ""
        return f"island {self.island}{process}"

    @property
    def stopped(self) -> bool:
        """Whether the rank was asked to stop, and did."""
        code = self.code
        if code is None and self.aborted:
            # before its first step, where it ended the others too
            code = find_abort_code(self.text)
        return _is_stopped(code, self.asked, self.last)

    @property
    def reported_hang(self) -> bool:
        """Whether its own watchdog diagnosed the hang."""
        return self.last.hung and bool(HANG.search(self.text))

    @property
    def aborted(self) -> bool:
        """Whether it called MPI_Abort, which ended all ranks."""
        return self.code is None and bool(ABORT.search(self.text) or TRACEBACK in self.text)

    @property
    def failed(self) -> bool:
        """Whether the rank ended by its own error or one that another rank caused; not by the launcher."""
        if self.orphaned or self.stopped:
            return False
        return self.aborted or self.last.hung or self.code not in (None, 0)

    @property
    def consequence(self) -> bool:
        """Whether another rank may be the cause: this one was asked to end, or lost a connection."""
        if self.last.hung:
            return not self.reported_hang
        return self.asked is not None or bool(CONSEQUENCE.search("\n".join(self.text.splitlines()[-5:])))

    @property
    def gave_up(self) -> bool:
        """Whether it only gave up: it lost another rank, or called MPI_Abort without an error."""
        return self.consequence or bool(ABORT.search(self.text) and TRACEBACK not in self.text)

    @property
    def killed(self) -> bool:
        """Whether someone outside of the launch killed it, as seen by its keeper."""
        return self.signal == signal.SIGKILL and self.asked is None and not (self.last.hung or self.orphaned)

    @property
    def how(self) -> str:
        """How the rank ended: `exit code 1`, `SIGKILL`, ..."""
        if self.last.hung:
            return "ended by its watchdog"
        if self.signal is not None:
            return f"killed by {signal.Signals(self.signal).name}"
        if self.code is None:
            return "called MPI_Abort" if self.aborted else "killed by the launcher"
        return f"exit code {self.code}"


def read_ranks(logs: Path) -> list[RankEnd]:
    """Read how the ranks of the last launch in a log folder ended, ordered by rank."""
    ends = []
    for path in logs.glob("rank-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        log = path.with_suffix(".log")
        text = read_log(log, record.pop("log_from"))
        known = {name: record.get(name) for name in RankEnd.__dataclass_fields__ if name in record}
        last = read_step_file(step_file_path(path))
        lost = path.with_suffix(LOST)
        known["lost_seconds"] = float(lost.read_text(encoding="utf-8")) if lost.exists() else None
        ends.append(RankEnd(**known, log=log, text=text, touched_seconds=log.stat().st_mtime, last=last))
    return sorted(ends, key=lambda end: end.rank)


def read_log(log: Path, start: int) -> str:
    """Read a log from a position, as it may begin with earlier starts."""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def has_failed(logs: Path) -> bool:
    """Return whether a rank has failed, while others may still run."""
    for path in logs.glob("rank-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        last = read_step_file(step_file_path(path))
        code = record["code"]
        if last.hung or (code not in (None, 0) and not _is_stopped(code, record["asked"], last)):
            return True
    return False


def _is_stopped(code: int | None, asked: str | None, last: LastStep) -> bool:
    """Return whether the rank stopped because a signal or its time limit asked it to."""
    if last.hung:
        return False
    return code == TEMPORARY_FAILURE or (asked is not None and code == 128 + signal.Signals[asked])


def find_abort_code(text: str) -> int:
    """Return the code of MPI_Abort in a log; 0 if it was not called."""
    found = ABORT.search(text)
    return int(found[1]) if found and found[1] else 0
