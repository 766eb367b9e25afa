"""Restart a launch after a crash or a hang, until it succeeds or a restart would not help.

Next: `supervise.py`, which runs a launch once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardtrain.errors.exit_codes import DONE, USAGE_ERROR
from shardtrain.errors.messages import refuse

LONGEST_SECONDS = 60.0
"""Longest wait between two starts."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Number and spacing of the restarts of a launch.

    Args:
      most: largest number of restarts; 0 disables them.
      backoff_seconds: wait before the first restart; it doubles each time, up to a minute.

    Raises:
      ValueError: lists every number out of range.
    """

    most: int = 0
    backoff_seconds: float = 1.0

    def __post_init__(self) -> None:
        problems = [f"restarts is {self.most}; use 0 or more"] if self.most < 0 else []
        if not 0 <= self.backoff_seconds <= LONGEST_SECONDS:
            problems.append(f"backoff is {self.backoff_seconds} s; use 0 to {LONGEST_SECONDS:g}")
        refuse("these restarts are not possible", problems)

    def pause_seconds(self, done: int) -> float:
        """Return the seconds to wait before the next restart.

        Args:
          done: number of restarts so far.

        >>> [Restarts(most=9).pause_seconds(done) for done in (0, 1, 5, 6, 99)]
        [1.0, 2.0, 32.0, 60.0, 60.0]
        """
        return min(self.backoff_seconds * 2 ** min(done, 30), LONGEST_SECONDS)


@dataclass(frozen=True, kw_only=True)
class LaunchEnd:
    """How one start of a launch ended.

    Args:
      code: its exit code.
      text: the report; "" if there is nothing to report.
      asked: whether it was asked to stop, by a user, a batch system or the time limit.
      step: the latest step that a rank had begun, from 1; 0 if no rank had begun one.
    """

    code: int
    text: str = ""
    asked: bool = False
    step: int = 0


def run_again(
    start: Callable[[int], LaunchEnd],
    restarts: Restarts,
    tell: Callable[[str], object],
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Run a launch until it succeeds, is asked to stop, or fails at the same step twice in a row.

    Args:
      start: number of the start, from 0 -> how it ended.
      restarts: number and spacing of the restarts.
      tell: receives messages.
      sleep: waits for some seconds.

    Returns:
      The exit code of the last start.
    """
    done, failed_at = 0, None
    while True:
        ended = start(done)
        # done, asked to stop, or a mistake of the user: another start does not help
        if ended.code in (DONE, USAGE_ERROR) or ended.asked or not restarts.most:
            return ended.code
        # the same step failed twice: it would fail again
        if ended.step == failed_at:
            why = "it failed before its first step twice in a row"
            if ended.step:
                why = f"step {ended.step} failed twice in a row, and would fail again"
            tell(f"launch: {why}: given up after {done} of {restarts.most} restarts\n")
            return ended.code
        if done == restarts.most:
            tell(f"launch: it failed again, and all {done} restarts are used\n")
            return ended.code
        # anything else may be an accident: wait longer each time, and start again
        failed_at, pause = ended.step, restarts.pause_seconds(done)
        done += 1
        where = f"at step {ended.step}" if ended.step else "before its first step"
        tell(
            f"\nlaunch: ended with exit code {ended.code} {where};"
            f" restart {done} of {restarts.most} in {pause:g} s\n"
        )
        sleep(pause)
