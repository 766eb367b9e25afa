"""Detect loss spikes, and choose the checkpoint to roll back to. No jax.

After a loss spike, a step that is not finite, or copies of parameters whose bits differ, a run restores the
state of an earlier step and skips the data in between. Next: `loop.py`.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Detection of silent faults, and how often a run may roll back.

    Args:
      spike: threshold of a loss spike, after which the run rolls back to an earlier checkpoint: a loss that
        exceeds the median of the previous losses by more than this many times their interquartile range.
        None disables the detection.
      window: number of previous losses in the window of spike detection, which starts once half of them are
        there.
      rollbacks: largest number of rollbacks; the next fault ends the run.
      fingerprint_every: number of steps between two comparisons of all copies of the parameters, to detect
        faulty devices; they are also compared before every save. None disables both.
      straggler: report an island as slow if its steps take this many times as long as on other islands.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    spike: float | None = None
    window: int = 64
    rollbacks: int = 3
    fingerprint_every: int | None = 100
    straggler: float = 1.5

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.spike is not None and not self.spike > 0:
            problems.append(f"spike is {self.spike}; use a number above 0, such as 8, or None")
        if self.window < 8:
            problems.append(f"window is {self.window} steps; use 8 or more, because quartiles need losses")
        if self.rollbacks < 0:
            problems.append(f"rollbacks is {self.rollbacks}; use 0 or more")
        if self.fingerprint_every is not None and self.fingerprint_every < 1:
            problems.append(f"fingerprint_every is {self.fingerprint_every}; use 1 or more, or None")
        if not self.straggler > 1:
            problems.append(f"straggler is {self.straggler}; use a number above 1, such as 1.5")
        refuse("these recovery options cannot be used", problems)


class RollBack(Exception):
    """Raised when a step was bad and the run must restore a state from before it.

    Args:
      step: the bad step.
      why: the reason, in a sentence.
    """

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step, self.why = step, why
        self.position: Any = None


@dataclass
class Spikes:
    """Detects loss spikes in a sliding window of previous losses.

    Args:
      factor: see `Recovery.spike`.
      window: see `Recovery.window`.

    >>> spikes = Spikes(8.0, 8)
    >>> [spikes.add(loss) for loss in (3.0, 99.0, 3.1, 3.0, 2.9, 9000.0)]
    [False, False, False, False, False, True]
    """

    factor: float
    window: int
    _losses: deque[float] = field(default_factory=deque)

    def limit(self) -> float:
        """Return the loss above which the next one is a spike."""
        if len(self._losses) < self.window // 2:
            return math.inf
        low, median, high = quantiles(self._losses, n=4)
        # equal losses have no interquartile range, and any other loss would be a spike
        return median + self.factor * max(high - low, 1e-3 * abs(median))

    def add(self, loss: float) -> bool:
        """Return whether the next loss is a spike; if it is not, add it to the window."""
        if loss > self.limit():
            return True
        self._losses.append(loss)
        if len(self._losses) > self.window:
            self._losses.popleft()
        return False


@dataclass
class Rollbacks:
    """The rollbacks of a run so far, and the newest step that the next one may restore.

    Args:
      most: see `Recovery.rollbacks`.

    >>> rollbacks = Rollbacks(3)
    >>> rollbacks.find_newest_allowed(RollBack(57, "a spike")); rollbacks.restored(50)
    56
    >>> rollbacks.find_newest_allowed(RollBack(60, "a spike"))  # soon after the first: step 50 was bad
    49
    """

    most: int
    _bad: list[int] = field(default_factory=list)
    _restored: list[int] = field(default_factory=list)

    def find_newest_allowed(self, fault: RollBack) -> int:
        """Return the newest step that may be restored after a fault, and count the rollback.

        Raises:
          FloatingPointError: the run has rolled back `most` times already.
        """
        if len(self._bad) >= self.most:
            before = f", and the run has rolled back {self.most} times already" if self.most else ""
            raise FloatingPointError(
                f"{fault.why}{before}; look for the cause (data, learning rate, the device that is named), or"
                f" set recovery.rollbacks to {self.most + 1} in the run file"
            )
        newest = fault.step - 1
        # as soon after the restored step as the last fault: the restored checkpoint is suspect
        if self._restored and fault.step - self._bad[-1] <= self._bad[-1] - self._restored[-1]:
            newest = min(newest, self._restored[-1] - 1)
        self._bad.append(fault.step)
        return newest

    def restored(self, step: int) -> None:
        """Record the step from which the run continues after a rollback."""
        if len(self._restored) < len(self._bad):
            self._restored.append(step)
