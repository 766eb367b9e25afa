"""How a launch ended: the rank that failed first and its error, from what `rank.py` left in the log folder.

Run by the supervisor, or behind srun in a batch script: `python -m shardtrain.launch.outcome LOGS --code N`.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain.errors.exit_codes import COME_AGAIN
from shardtrain.islands.watchdog.step_file import NOTHING, LastStep, read_step_file
from shardtrain.launch.rank import LOST, island_name, step_file_path
from shardtrain.system import terminal

CONSEQUENCE = re.compile(
    r"MPI_ERR_|mpi4py\.MPI\.Exception|internal_\w+: |Communication error with rank|PMIX|"
    r"[Cc]oordination service|heartbeat|Connection (reset|refused|closed)|Gloo|Broken pipe|\bMissing: "
)
"""An error that a rank gets when another is gone; it counts only where there is no other."""

ABORT = re.compile(r"called MPI_Abort\([^,]*, (\d+)\)|MPI_ABORT was invoked")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
TRACEBACK = "Traceback (most recent call last)"
AFTERWARDS = re.compile(
    r"application called MPI_Abort|Abort\(\d+\) on node|MPI_ABORT was invoked|Exception ignored in|[-=]{20}"
)
MOST_LINES, FIRST_LINES, TAIL_LINES = 60, 8, 15
MISTAKE = re.compile(r"shardtrain[.\w]*( \w+)?: ")
MISTAKE_END = re.compile(r"\(the traceback: SHARDTRAIN_TRACEBACK=1\)$")
"""How `cli` begins and ends what it says of a user's mistake, see `cli.main`."""

HANG, HANG_END = re.compile(r"shardtrain watchdog: "), re.compile(r"\(stacks of the ranks ")
"""The same of what a rank's watchdog says, see `islands/watchdog/watchdog.py`."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Args:
      rank: of how many: `size`.
      island, process, num_processes: its seat.
      host: where it ran.
      start_seconds: since the epoch, by its host's clock, as is `end_seconds`.
      end_seconds: None where the launcher killed it and its keeper.
      code: its exit code; 128 + n for a signal; None likewise.
      signal: that ended it, if one did.
      asked: name of a signal that was passed on to it.
      log: its log.
      text: what the log got in this launch.
      touched_seconds: when the log was last written.
      last: the step that it was doing, and whether its watchdog ended it.
      lost_seconds: when its keeper was found to be gone, by its host's clock.
      orphaned: its launcher was gone first.
      pid: of its keeper.
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
        """`island 1`, or `island 1.0`."""
        return f"island {island_name(self.island, self.process, self.num_processes)}"

    @property
    def stopped(self) -> bool:
        """It was asked to stop, and did."""
        code = self.code
        if code is None and self.aborted:
            # before its first step, where it ended the others too
            code = _abort_code(self.text)
        return _stopped(code, self.asked, self.last)

    @property
    def told_hang(self) -> bool:
        """Its watchdog found why the run hangs, and said so."""
        return self.last.hung and bool(HANG.search(self.text))

    @property
    def aborted(self) -> bool:
        """It ended the whole launch by itself, its keeper with it."""
        return self.code is None and bool(ABORT.search(self.text) or TRACEBACK in self.text)

    @property
    def failed(self) -> bool:
        """It ended by a fault of its own or of another, and was not killed by the launcher."""
        if self.orphaned or self.stopped:
            return False
        return self.aborted or self.last.hung or self.code not in (None, 0)

    @property
    def consequence(self) -> bool:
        """Another rank's end may be why: it was told to end, or lost a neighbour."""
        if self.last.hung:
            return not self.told_hang
        return self.asked is not None or bool(CONSEQUENCE.search("\n".join(self.text.splitlines()[-5:])))

    @property
    def how(self) -> str:
        """`exit code 1`, `SIGKILL`, ..."""
        if self.last.hung:
            return "ended by its watchdog"
        if self.signal is not None:
            return f"killed by {signal.Signals(self.signal).name}"
        if self.code is None:
            return "called MPI_Abort" if self.aborted else "killed by the launcher"
        return f"exit code {self.code}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The exit code of a launch, and what to tell; no text where all is well.

    Args:
      code: of the launch.
      text: for people.
      asked: all ranks were asked to stop by a signal, and did.
    """

    code: int
    text: str = ""
    asked: bool = False


def read_ranks(logs: Path) -> list[RankEnd]:
    """What the ranks of the last launch in a log folder left, by rank."""
    ends = []
    for path in logs.glob("rank-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        log = path.with_suffix(".log")
        with log.open("rb") as file:
            file.seek(record.pop("log_from"))
            text = file.read().decode(errors="replace")
        known = {name: record.get(name) for name in RankEnd.__dataclass_fields__ if name in record}
        last = read_step_file(step_file_path(path))
        lost = path.with_suffix(LOST)
        known["lost_seconds"] = float(lost.read_text(encoding="utf-8")) if lost.exists() else None
        ends.append(RankEnd(**known, log=log, text=text, touched_seconds=log.stat().st_mtime, last=last))
    return sorted(ends, key=lambda end: end.rank)


def any_failed(logs: Path) -> bool:
    """Whether a rank has failed, while others may still run."""
    for path in logs.glob("rank-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        last = read_step_file(step_file_path(path))
        code = record["code"]
        if last.hung or (code not in (None, 0) and not _stopped(code, record["asked"], last)):
            return True
    return False


def _stopped(code: int | None, asked: str | None, last: LastStep) -> bool:
    """It was asked to stop by a signal, or by its own time limit, and did."""
    if last.hung:
        return False
    return code == COME_AGAIN or (asked is not None and code == 128 + signal.Signals[asked])


def judge(
    ends: Sequence[RankEnd], launcher: str, launcher_code: int, asked: signal.Signals | None = None
) -> Outcome:
    """Who failed first, and why.

    The first is the one that ended first by a fault of its own: not by a signal that it was sent on the
    launcher's behalf, nor with the errors that MPI gives when a neighbour is gone.

    Args:
      ends: of the ranks.
      launcher: its name, for people.
      launcher_code: what it ended with; a negative number for a signal.
      asked: the signal for which all ranks were asked to stop.

    Returns:
      The exit code of the first that failed, and its last traceback or lines under a headline.
    """
    failed = [end for end in ends if end.failed]
    if not failed:
        return _without_failure(ends, launcher, launcher_code, asked)
    # of several that say that it hangs, on both sides of a cut link, rank 0's side is that of the launcher
    first = min(failed, key=lambda end: (end.consequence, end.told_hang and end.rank, _ended_seconds(end)))
    seconds = _ended_seconds(first) - first.start_seconds
    after = f"{max(seconds, 0):.0f} s after its start"
    headline = f"{first.name} failed first: rank {first.rank} on {first.host}, {first.how}, {after}"
    if first.told_hang:
        headline = f"the run hung: {first.name} on {first.host} noticed it, {after}"
    text = f"\n{_ruled(headline)}\n{error_text(first.text)}\n"
    if first.signal == signal.SIGKILL:
        text += "(the kernel does that when memory runs out: see dmesg there, or sacct of the job)\n"
    rest = [end for end in ends if end is not first]
    for what, chosen in _by_end(rest):
        text += f"\nthen: {_names(chosen)} {what}"
    text += f"\nwhole log: {first.log}" + (" (the others lie beside it)" if rest else "")
    code = COME_AGAIN if first.last.hung else first.code
    return Outcome(code=code or _abort_code(first.text) or abs(launcher_code) or 1, text=text + "\n")


def _ended_seconds(end: RankEnd) -> float:
    return end.end_seconds or end.touched_seconds


def _without_failure(
    ends: Sequence[RankEnd], launcher: str, launcher_code: int, asked: signal.Signals | None
) -> Outcome:
    stopped = [end for end in ends if end.stopped]
    lost = [end for end in ends if end.code is None and not end.stopped]
    code = launcher_code if launcher_code >= 0 else 128 - launcher_code
    if stopped and not lost:
        by = stopped[0].asked or "the time limit"
        text = f"stopped by {by}: {_names(stopped)}\n"
        code = stopped[0].code or _abort_code(stopped[0].text)
        return Outcome(code=code, text=text, asked=stopped[0].asked is not None)
    if asked is not None and all(end.last.step == NOTHING.step for end in ends):
        # some ranks had not begun to listen
        text = f"stopped by {asked.name} before all ranks had begun\n"
        return Outcome(code=128 + asked, text=text, asked=True)
    missing = sorted(set(range(ends[0].size)) - {end.rank for end in ends}) if ends else []
    if code == 0 and not missing and not lost:
        return Outcome(code=0)
    text = _from_outside(ends, lost, launcher, launcher_code)
    if not ends:
        text += "No rank was started: what the launcher printed stands above.\n"
    if missing:
        text += f"Never started: rank {', '.join(map(str, missing))} of {ends[0].size}.\n"
    return Outcome(code=code or 1, text=f"\n{text}")


def _from_outside(ends: Sequence[RankEnd], lost: Sequence[RankEnd], launcher: str, launcher_code: int) -> str:
    """What is known of a launch that ended though no rank failed."""
    if launcher_code < 0:
        rest = f"{_names(ends)} ended with it.\n" if ends else ""
        return _ruled(f"{launcher} was killed by {signal.Signals(-launcher_code).name}") + f"\n{rest}"
    if dated := [end for end in lost if end.lost_seconds is not None]:
        first = min(dated, key=lambda end: end.lost_seconds or 0.0)
        keeps = f"the process that keeps rank {first.rank} on {first.host}"
        rest = [end for end in ends if end is not first]
        return (
            _ruled(f"{first.name} was lost first: {keeps}")
            + f"\nThat process ({first.pid}) was killed from outside, and its rank with it.\n"
            + (f"then: {_names(rest)} ended by the launcher\n" if rest else "")
        )
    text = _ruled(f"{launcher} ended with exit code {launcher_code}, and no rank says why") + "\n"
    if lost:
        text += f"Ended from outside: {_names(lost)}; logs: {lost[0].log.parent}\n"
    return text


def _by_end(ends: Sequence[RankEnd]) -> list[tuple[str, list[RankEnd]]]:
    groups: dict[str, list[RankEnd]] = {}
    for end in ends:
        if end.code == 0:
            what = "finished"
        elif end.failed:
            what = f"failed too: {end.how}"
        elif end.asked not in (None, "SIGTERM"):
            what = f"stopped at {end.asked}"
        else:
            what = "ended by the launcher"
        groups.setdefault(what, []).append(end)
    return list(groups.items())


def _names(ends: Sequence[RankEnd]) -> str:
    """`island 0 on a`, or `islands 0, 2, 3` with at most eight of them."""
    if len(ends) == 1:
        return f"{ends[0].name} on {ends[0].host}"
    names = [end.name.removeprefix("island ") for end in ends]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"islands {', '.join(names[:8])}{more}"


def _ruled(headline: str) -> str:
    return f"=== {headline} ==="


def _abort_code(text: str) -> int:
    found = ABORT.search(text)
    return int(found[1]) if found and found[1] else 0


def error_text(log: str) -> str:
    """What went wrong, from a log: its last traceback, with those it is chained to; what the command line
    said of a mistake; or its last lines.

    >>> print(error_text("step 1\\nTraceback (most recent call last):\\n  File ...\\nValueError: no\\n"))
    Traceback (most recent call last):
      File ...
    ValueError: no
    """
    # a bar is drawn again and again in one line
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
    """What stands between the mark of a mistake and that of its end; the libraries' farewell is left out."""
    return _between(lines, MISTAKE, MISTAKE_END)


def _between(lines: Sequence[str], first: re.Pattern, last: re.Pattern) -> list[str]:
    """The last lines from one to another."""
    ends = [i for i, line in enumerate(lines) if last.match(line)]
    starts = [i for i, line in enumerate(lines[: ends[-1]]) if first.match(line)] if ends else []
    return list(lines[starts[-1] : ends[-1] + 1]) if starts else []


def _ignored(lines: Sequence[str], index: int) -> bool:
    return index > 0 and lines[index - 1].startswith("Exception ignored in")


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = terminal.err) -> int:
    """Tell how a launch ended; returns its exit code."""
    parser = argparse.ArgumentParser(prog="shardtrain.launch.outcome", description=__doc__)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--code", type=int, default=0, help="what the launcher ended with")
    parser.add_argument("--launcher", default="srun")
    options = parser.parse_args(arguments)
    outcome = judge(read_ranks(options.logs), options.launcher, options.code)
    write(outcome.text)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
