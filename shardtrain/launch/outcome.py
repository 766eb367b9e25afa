"""Report how a launch ended: find the rank that failed first, from the records in the log folder.

The supervisor calls it; batch scripts run `python -m shardtrain.launch.outcome LOGS --code N`.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.islands.watchdog.step_file import NOTHING
from shardtrain.launch.rank_end import RankEnd, error_text, find_abort_code, read_ranks
from shardtrain.launch.restarts import LaunchEnd
from shardtrain.system import terminal
from shardtrain.system.excerpts import some


def diagnose_launch(
    ends: Sequence[RankEnd], launcher: str, launcher_code: int, asked: signal.Signals | None = None
) -> LaunchEnd:
    """Find the rank that failed first, and report its error.

    Ranks that the launcher ended by a signal, or that report MPI's error for a lost peer, do not count.

    Args:
      ends: how each rank ended.
      launcher: the launcher's name, for the report.
      launcher_code: the launcher's exit code; negative for a signal.
      asked: the signal for which all ranks were asked to stop.

    Returns:
      The exit code of the rank that failed first, and its last traceback or lines under a headline.
    """
    failed = [end for end in ends if end.failed]
    if not failed:
        return _report_without_failure(ends, launcher, launcher_code, asked)
    # both sides of a cut link report a hang: prefer the side of rank 0, where the launcher runs
    # and a rank that was killed, or crashed, comes before those that gave up without it
    first = min(
        failed,
        key=lambda end: (
            *(not end.killed, end.gave_up, end.consequence, end.reported_hang and end.rank),
            _end_seconds(end),
        ),
    )  # fmt: skip
    seconds = _end_seconds(first) - first.start_seconds
    after = f"{max(seconds, 0):.0f} s after its start"
    # the error of that rank comes first, then how the others ended
    headline = f"{first.name} failed first: rank {first.rank} on {first.host}, {first.how}, {after}"
    if first.reported_hang:
        headline = f"the run hung: {first.name} on {first.host} noticed it, {after}"
    text = f"\n{_format_ruled(headline)}\n{error_text(first.text)}\n"
    if first.signal == signal.SIGKILL:
        text += "(the kernel does that when memory runs out: see dmesg there, or sacct of the job)\n"
    rest = [end for end in ends if end is not first]
    for what, chosen in _group_by_end(rest):
        text += f"\nthen: {_names(chosen)} {what}"
    text += f"\nwhole log: {first.log}" + (" (the others are beside it)" if rest else "")
    code = TEMPORARY_FAILURE if first.last.hung else first.code
    return LaunchEnd(code=code or find_abort_code(first.text) or abs(launcher_code) or 1, text=text + "\n")


def _end_seconds(end: RankEnd) -> float:
    return end.end_seconds or end.touched_seconds


def _report_without_failure(
    ends: Sequence[RankEnd], launcher: str, launcher_code: int, asked: signal.Signals | None
) -> LaunchEnd:
    # 1. all ranks stopped as they were asked to
    stopped = [end for end in ends if end.stopped]
    lost = [end for end in ends if end.code is None and not end.stopped]
    code = launcher_code if launcher_code >= 0 else 128 - launcher_code
    if stopped and not lost:
        by = stopped[0].asked or "the time limit"
        text = f"stopped by {by}: {_names(stopped)}\n"
        code = stopped[0].code or find_abort_code(stopped[0].text)
        return LaunchEnd(code=code, text=text, asked=stopped[0].asked is not None)
    if asked is not None and all(end.last.step == NOTHING.step for end in ends):
        # some ranks did not handle signals yet
        text = f"stopped by {asked.name} before all ranks had begun\n"
        return LaunchEnd(code=128 + asked, text=text, asked=True)
    # 2. all ranks ran to their end
    missing = sorted(set(range(ends[0].size)) - {end.rank for end in ends}) if ends else []
    if code == 0 and not missing and not lost:
        return LaunchEnd(code=0)
    # 3. someone else ended ranks, or they never started
    text = _report_outside(ends, lost, launcher, launcher_code)
    if not ends:
        text += "No rank was started: what the launcher printed is above.\n"
    if missing:
        text += f"Never started: rank {', '.join(map(str, missing))} of {ends[0].size}.\n"
    return LaunchEnd(code=code or 1, text=f"\n{text}")


def _report_outside(
    ends: Sequence[RankEnd], lost: Sequence[RankEnd], launcher: str, launcher_code: int
) -> str:
    """Format the report of a launch that ended although no rank failed."""
    if launcher_code < 0:
        rest = f"{_names(ends)} ended with it.\n" if ends else ""
        return _format_ruled(f"{launcher} was killed by {signal.Signals(-launcher_code).name}") + f"\n{rest}"
    # the keeper of a rank that died first was killed by someone else: the others are consequences
    if dated := [end for end in lost if end.lost_seconds is not None]:
        first = min(dated, key=lambda end: end.lost_seconds or 0.0)
        keeps = f"the process that keeps rank {first.rank} on {first.host}"
        rest = [end for end in ends if end is not first]
        return (
            _format_ruled(f"{first.name} was lost first: {keeps}")
            + f"\nThat process ({first.pid}) was killed from outside, and its rank with it.\n"
            + (f"then: {_names(rest)} ended by the launcher\n" if rest else "")
        )
    text = _format_ruled(f"{launcher} ended with exit code {launcher_code}, and no rank says why") + "\n"
    if lost:
        text += f"Ended from outside: {_names(lost)}; logs: {lost[0].log.parent}\n"
    return text


def _group_by_end(ends: Sequence[RankEnd]) -> list[tuple[str, list[RankEnd]]]:
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
    """Format the names of ranks: `island 0 on a`, or `islands 0, 2, 3` with at most eight of them."""
    if len(ends) == 1:
        return f"{ends[0].name} on {ends[0].host}"
    return f"islands {some([end.name.removeprefix('island ') for end in ends])}"


def _format_ruled(headline: str) -> str:
    return f"=== {headline} ==="


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = terminal.err) -> int:
    """Report how a launch ended; return its exit code."""
    parser = argparse.ArgumentParser(prog="shardtrain.launch.outcome", description=__doc__)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--code", type=int, default=0, help="the launcher's exit code")
    parser.add_argument("--launcher", default="srun")
    options = parser.parse_args(arguments)
    outcome = diagnose_launch(read_ranks(options.logs), options.launcher, options.code)
    write(outcome.text)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
