"""The wall time of a run over all its starts, and the updates of this start."""

import math
import time
from collections.abc import Callable
from typing import Any

from shardtrain.report.quantities import count_text, duration_text


class RunTotals:
    """Counts updates, and the seconds since the run began.

    A checkpoint has the seconds until it was saved, and a start that resumes from it adds its own. So the
    time between two starts is not in them, nor the time of steps that were lost because they were not saved.

    Args:
      clock: monotonic, in seconds; this start begins now.

    >>> now = [100.0]
    >>> totals = RunTotals(lambda: now[0])
    >>> totals.resumed(60.0)
    >>> now[0] += 15.0
    >>> totals.wall_seconds()
    75.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start_seconds = clock, clock()
        self._before_seconds: float | None = None
        self._num_updates = 0
        self._num_judged = self._num_clipped = 0

    def resumed(self, wall_seconds: float) -> None:
        """Add the seconds of earlier starts; a rollback of this start resumes too, and changes nothing."""
        if self._before_seconds is None:
            self._before_seconds = wall_seconds

    def wall_seconds(self) -> float:
        """Return the seconds since the run began."""
        return (self._before_seconds or 0.0) + self._clock() - self._start_seconds

    def updated(self, clipped: bool | None) -> None:
        """Count an update; None: it is not known whether its gradient was clipped."""
        self._num_updates += 1
        if clipped is not None:
            self._num_judged += 1
            self._num_clipped += clipped

    def summary(self, step: int) -> str:
        """Return the line at the end of a run.

        Args:
          step: steps done since the run began.

        >>> now = [0.0]
        >>> totals = RunTotals(lambda: now[0])
        >>> totals.updated(clipped=True), totals.updated(clipped=False)
        (None, None)
        >>> now[0] = 80.0
        >>> totals.summary(2)
        '2 steps in 1m20s; this start: 2 updates, 0.03 updates/s, 50% clipped'
        """
        seconds = self._clock() - self._start_seconds
        parts = [f"{self._num_updates} updates"]
        if self._num_updates and seconds > 0:
            parts.append(f"{count_text(self._num_updates / seconds)} updates/s")
        if self._num_judged:
            parts.append(f"{self._num_clipped / self._num_judged:.0%} clipped")
        return f"{step} steps in {duration_text(self.wall_seconds())}; this start: {', '.join(parts)}"


def saved_wall_seconds(value: Any) -> float:
    """Return the wall time that a checkpoint has; 0 if it has none, or no such number.

    >>> saved_wall_seconds(2), saved_wall_seconds(None), saved_wall_seconds("x"), saved_wall_seconds(-1.0)
    (2.0, 0.0, 0.0, 0.0)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < math.inf else 0.0
