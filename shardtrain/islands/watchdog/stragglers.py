"""Find slow islands from the seconds of their own work in a step. Values only, no MPI."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

WINDOW = 20
"""Number of steps of a median: one slow step does not make a slow host."""

LEAST_SECONDS = 0.05
"""Smallest difference to the median of the others that counts as slow."""


class StepTimer:
    """A timer of this rank's own work between two votes: from the start of each step to its first barrier.

    The time after that barrier, the exchange with its waits and the update, is counted separately; saves and
    evaluations do not count.

    Args:
      clock: a monotonic clock in seconds.

    >>> now = [0.0]
    >>> timer = StepTimer(clock=lambda: now[0])
    >>> timer.take() is None
    True
    >>> for seconds in (1.0, 3.0):
    ...     timer.begin()
    ...     now[0] += seconds
    >>> timer.end()
    >>> now[0] += 1.0
    >>> timer.take()
    (2.0, 0.5)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._num_steps = clock, 0
        self._start_seconds: float | None = None
        self._seconds: float | None = None
        self._end_seconds: float | None = None
        self._rest_seconds = 0.0

    def begin(self) -> None:
        """Start the timer, unless it runs: a step begins."""
        self._num_steps += 1
        if self._start_seconds is None:
            self._start_seconds = self._clock()
            self._end_rest()

    def end(self) -> None:
        """Stop the timer, if it runs: this rank reaches a barrier."""
        if self._start_seconds is not None:
            self._end_seconds = self._clock()
            self._seconds = (self._seconds or 0.0) + self._end_seconds - self._start_seconds
            self._start_seconds = None

    def take(self) -> tuple[float, float] | None:
        """Return (own work, rest after the barrier) in seconds per step since the last call; or None."""
        self._end_rest()
        seconds, rest, num_steps = self._seconds, self._rest_seconds, max(self._num_steps, 1)
        self._seconds, self._start_seconds, self._num_steps, self._rest_seconds = None, None, 0, 0.0
        return None if seconds is None else (seconds / num_steps, rest / num_steps)

    def _end_rest(self) -> None:
        if self._end_seconds is not None:
            self._rest_seconds += self._clock() - self._end_seconds
            self._end_seconds = None


class Stragglers:
    """Detect islands that keep the others waiting, over the last `WINDOW` steps.

    Args:
      names: rank -> its name in messages.
      factor: a rank is slow if it takes this many times the median of the others.

    >>> stragglers = Stragglers(["island 0", "island 1", "island 2"], 1.5)
    >>> messages = [stragglers.add([1.0, 2.0, 1.0]) for _ in range(2 * WINDOW)]
    >>> messages[WINDOW - 1]
    'island 1 is slow: its own work takes 2.00 s a step, that of the others 1.00 s; give its island a \
smaller share of the rows (--shares), or look at its host'
    >>> [text for text in messages if text] == [messages[WINDOW - 1]]  # only once
    True
    """

    def __init__(self, names: Sequence[str], factor: float) -> None:
        self._names, self._factor = list(names), factor
        self._steps: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._reported: frozenset[int] = frozenset()

    def add(self, seconds: Sequence[float]) -> str | None:
        """Add the times of a step; return a message if other ranks are slow than before.

        Args:
          seconds: rank -> seconds of its own work, without waiting for others.

        Returns:
          The message; None if no rank is slow, or the same ones as reported last.
        """
        self._steps.append(seconds)
        if len(self._steps) < WINDOW or len(self._names) < 2:
            return None
        # medians over the window: a single slow step makes no straggler
        each = [median(step[rank] for step in self._steps) for rank in range(len(self._names))]
        slow = frozenset(rank for rank in range(len(each)) if self._is_slow(rank, each))
        # report a change of the slow ranks, not the same ones in every step
        reported, self._reported = self._reported, slow
        if not slow or slow == reported:
            return None
        usual = median(x for rank, x in enumerate(each) if rank not in slow)
        lines = [
            f"{self._names[rank]} is slow: its own work takes {each[rank]:.2f} s a step, that of the others"
            f" {usual:.2f} s"
            for rank in sorted(slow)
        ]
        return (
            f"{'; '.join(lines)}; give its island a smaller share of the rows (--shares), or look at its host"
        )

    def restart(self) -> None:
        """Forget all steps: the shares of the islands have changed."""
        self._steps.clear()
        self._reported = frozenset()

    def medians(self) -> dict[str, float]:
        """Return name of a rank -> median seconds of its own work in a step; {} before the first step."""
        if not self._steps:
            return {}
        return {name: median(step[rank] for step in self._steps) for rank, name in enumerate(self._names)}

    def _is_slow(self, rank: int, each: Sequence[float]) -> bool:
        others = median(x for other, x in enumerate(each) if other != rank)
        return each[rank] > max(self._factor * others, others + LEAST_SECONDS)
