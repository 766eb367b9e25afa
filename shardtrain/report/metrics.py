"""Values that merge over steps and devices: means, rates; and the interface of a progress display.

No jax: the values are numbers that have left the device. Next: `sinks/`, where a run writes them;
`progress.py`, what people read on the terminal.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean that merges: a sum and the count it is over (examples or tokens).

    `+` merges two, `Mean()` is neutral, and `sum(parts, Mean())` merges many, so a mean over steps, devices
    or uneven batches is the mean over all that they hold.

    Args:
        sum: the sum of the values.
        count: how many values, or their total weight; at least 0.

    Raises:
        ValueError: the count is negative.

    Examples:
        >>> (Mean(sum=6.0, count=2) + Mean(sum=3.0, count=1)).value
        3.0
        >>> print(Mean().value)
        None
    """

    sum: float = 0.0
    count: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(
                f"a mean over count {self.count:g} was asked for. A count is 0 or more: "
                "pass how many values the sum is over."
            )

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def value(self) -> float | None:
        """Sum over count; None if the count is 0."""
        return self.sum / self.count if self.count else None


class Rate:
    """Units per second over the last steps, without the first, which compiles. The caller reads the clock.

    It changes in place: a step of a millisecond has several rates.

    Args:
        window_steps: how many of the last calls of `add` the rate is over; at least 1.

    Raises:
        ValueError: the window is shorter than one step, or (`add`) the clock ran backwards.

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
        if window_steps < 1:
            raise ValueError(f"a rate over {window_steps} steps was asked for. Use window_steps=1 or more.")
        # (seconds, units until then), oldest first
        self._marks: deque[tuple[float, float]] = deque(maxlen=window_steps + 1)

    def add(self, *, now_seconds: float, units: float) -> None:
        """Add `units` that are done at `now_seconds`; the first call only starts the clock."""
        last_seconds, total = self._marks[-1] if self._marks else (now_seconds, 0.0)
        if now_seconds < last_seconds:
            raise ValueError(
                f"a rate was asked for at {now_seconds:g} s, before its last step at {last_seconds:g} s. "
                "Pass times of one clock that does not run backwards, such as time.monotonic()."
            )
        self._marks.append((now_seconds, total + units))

    def pause(self, seconds: float) -> None:
        """Do not count `seconds` since the last step (held-out evaluation, a checkpoint)."""
        marks = [(at + seconds, total) for at, total in self._marks]
        self._marks.clear()
        self._marks.extend(marks)

    @property
    def per_second(self) -> float | None:
        """Units per second; None until a second step is done."""
        if not self._marks:
            return None
        (start_seconds, start_units), (end_seconds, end_units) = self._marks[0], self._marks[-1]
        elapsed_seconds = end_seconds - start_seconds
        return (end_units - start_units) / elapsed_seconds if elapsed_seconds > 0 else None


class Progress(Protocol):
    """The progress display of a loop; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show that a step is done.

        Args:
            step: steps done since the start of the run, resumed or not.
            values: the metrics by name, as in the sinks; only `train/loss`, `heldout/loss`,
              `<unit>_per_second` and `mfu` are shown.
        """
        ...

    def note(self, text: str) -> None:
        """Print a message (a saved checkpoint, a warning) without breaking the bar."""
        ...
