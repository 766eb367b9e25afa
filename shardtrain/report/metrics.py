"""Means and rates that merge over steps and devices. No jax.

Next: `sinks/`, where a run writes them; `progress.py`, which shows them on the terminal.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean that merges: a sum and its count of examples or tokens.

    `+` merges two means, `Mean()` is neutral, and `sum(parts, Mean())` merges many, so that uneven steps or
    devices give the mean over all values.

    Args:
        sum: the sum of the values.
        count: the number of values, or their total weight; at least 0.

    Examples:
        >>> (Mean(sum=6.0, count=2) + Mean(sum=3.0, count=1)).value
        3.0
        >>> print(Mean().value)
        None
    """

    sum: float = 0.0
    count: float = 0.0

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def value(self) -> float | None:
        """Sum over count; None if the count is 0."""
        return self.sum / self.count if self.count else None


class Rate:
    """Units per second over the last steps, without the first step, which compiles.

    Args:
        window_steps: number of last calls of `add` over which the rate is computed; at least 1.

    Examples:
        >>> rate = Rate()
        >>> rate.add(now_seconds=60.0, units=512)
        >>> print(rate.per_second)
        None
        >>> rate.add(now_seconds=62.0, units=512)
        >>> rate.per_second
        256.0
    """

    def __init__(self, window_steps: int = 50) -> None:
        # (seconds, units until then), oldest first
        self._marks: deque[tuple[float, float]] = deque(maxlen=window_steps + 1)

    def add(self, *, now_seconds: float, units: float) -> None:
        """Add `units` that are done at `now_seconds` of a monotonic clock; the first call only starts it."""
        total = self._marks[-1][1] if self._marks else 0.0
        self._marks.append((now_seconds, total + units))

    def pause(self, seconds: float) -> None:
        """Exclude `seconds` since the last step, as of an evaluation or a save."""
        marks = [(at + seconds, total) for at, total in self._marks]
        self._marks = deque(marks, self._marks.maxlen)

    @property
    def per_second(self) -> float | None:
        """Units per second; None until a second step is done."""
        if not self._marks:
            return None
        (start_seconds, start_units), (end_seconds, end_units) = self._marks[0], self._marks[-1]
        elapsed_seconds = end_seconds - start_seconds
        return (end_units - start_units) / elapsed_seconds if elapsed_seconds > 0 else None
