"""Which island is slow: from how long each one's own work of a step takes. Values only, no MPI."""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOW = 20
"""So many steps are looked at together: one slow step is no slow host."""

LEAST_SECONDS = 0.05
"""A smaller difference is nobody's business, however many times the others' it is."""


class StepTimer:
    """How long this rank works in a step: from where all part to where it comes to the next meeting."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: float | None = None

    def begin(self) -> None:
        """All go on to the next step."""
        self._began = time.monotonic()

    def end(self) -> None:
        """What this rank has to do alone is done."""
        self._seconds = time.monotonic() - self._began

    def take(self) -> float | None:
        """The seconds of this step, None where nobody said when they end."""
        seconds, self._seconds = self._seconds, None
        return seconds


class Stragglers:
    """Names islands that keep the others waiting.

    Args:
      names: by rank, as people call them.
      factor: slow is who takes this many times the median of the others.

    >>> stragglers = Stragglers(["island 0", "island 1", "island 2"], 1.5)
    >>> told = [stragglers.add([1.0, 2.0, 1.0]) for _ in range(2 * WINDOW)]
    >>> told[WINDOW - 1]
    'island 1 is slow: its own work takes 2.00 s a step, that of the others 1.00 s; give its island a \
smaller share of the rows (--shares), or look at its host'
    >>> [text for text in told if text] == [told[WINDOW - 1]]  # it is told once
    True
    """

    def __init__(self, names: Sequence[str], factor: float) -> None:
        self._names, self._factor = list(names), factor
        self._steps: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._told: frozenset[int] = frozenset()

    def add(self, seconds: Sequence[float]) -> str | None:
        """A step is done.

        Args:
          seconds: by rank: what it worked itself, without waiting for others.

        Returns:
          Who is slow by now, where that is not what was told last.
        """
        self._steps.append(seconds)
        if len(self._steps) < WINDOW or len(self._names) < 2:
            return None
        each = [median(step[rank] for step in self._steps) for rank in range(len(self._names))]
        slow = frozenset(rank for rank in range(len(each)) if self._is_slow(rank, each))
        told, self._told = self._told, slow
        if not slow or slow == told:
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

    def _is_slow(self, rank: int, each: Sequence[float]) -> bool:
        others = median(x for other, x in enumerate(each) if other != rank)
        return each[rank] > max(self._factor * others, others + LEAST_SECONDS)
