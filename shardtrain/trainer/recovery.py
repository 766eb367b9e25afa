"""When a run goes back to a checkpoint by itself, and to which: values only, no jax.

A loss that leaps, a step that is not finite, copies of parameters that are no longer the same bits: the state
is that of an earlier step again, and the data in between is not seen a second time. Next: `loop.py`.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a run does about silent faults.

    Args:
      spike: a loss is a spike if it lies above the median of the losses before by more than this many times
        the distance between their quartiles; the run goes back then. None: losses are not judged.
      window: so many losses before are looked at; nothing is a spike before half of them are there.
      rollbacks: so often at most; then the run ends.
      fingerprint_every: steps between comparisons of all copies of the parameters, which also go before
        every save; None: none.
      straggler: an island is named as slow if a step takes it this many times what it takes the others.

    Raises:
      ValueError: lists every value of a wrong kind or out of range.
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
            problems.append(f"window is {self.window} steps; use 8 or more, for quartiles need some losses")
        if self.rollbacks < 0:
            problems.append(f"rollbacks is {self.rollbacks}; use 0 or more")
        if self.fingerprint_every is not None and self.fingerprint_every < 1:
            problems.append(f"fingerprint_every is {self.fingerprint_every}; use 1 or more, or None")
        if not self.straggler > 1:
            problems.append(f"straggler is {self.straggler}; use a number above 1, such as 1.5")
        if problems:
            raise problems_error("faults cannot be dealt with like this", problems)


class RollBack(Exception):
    """A step was found to be bad; the state before it is wanted again.

    Args:
      step: the bad step.
      why: in a sentence.
    """

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step, self.why = step, why
        self.position: Any = None


@dataclass
class Spikes:
    """Which losses leap out of those before.

    Args:
      factor: see `Recovery.spike`.
      window: see `Recovery.window`.

    >>> spikes = Spikes(8.0, 8)
    >>> [spikes.limit_after(loss) for loss in (3.0, 2.9, 3.1, 3.0)][:3]
    [inf, inf, inf]
    >>> spikes.add(2.9), spikes.add(5.0)
    (False, True)
    """

    factor: float
    window: int
    _losses: deque[float] = field(default_factory=deque)

    def limit(self) -> float:
        """A loss above this is a spike."""
        if len(self._losses) < self.window // 2:
            return math.inf
        low, median, high = quantiles(self._losses, n=4)
        # equal losses have no spread, and every other loss would be far away
        return median + self.factor * max(high - low, 1e-3 * abs(median))

    def limit_after(self, loss: float) -> float:
        """The limit once this loss is one of those before."""
        self._losses.append(loss)
        while len(self._losses) > self.window:
            self._losses.popleft()
        return self.limit()

    def add(self, loss: float) -> bool:
        """Whether the next loss is a spike; if not, it is one of those before from now on."""
        if loss > self.limit():
            return True
        self.limit_after(loss)
        return False


@dataclass
class Rollbacks:
    """To which steps a run went back, and to which it goes next.

    Args:
      most: see `Recovery.rollbacks`.

    >>> rollbacks = Rollbacks(3)
    >>> rollbacks.newest_allowed(RollBack(57, "a spike")); rollbacks.restored(50)
    56
    >>> rollbacks.newest_allowed(RollBack(60, "a spike"))  # not far behind the first: step 50 was bad already
    49
    """

    most: int
    _bad: list[int] = field(default_factory=list)
    _restored: list[int] = field(default_factory=list)

    def newest_allowed(self, fault: RollBack) -> int:
        """The newest step that may be gone back to.

        Raises:
          FloatingPointError: the run went back as often as it may.
        """
        if len(self._bad) >= self.most:
            before = f", and the run went back {self.most} times already" if self.most else ""
            raise FloatingPointError(
                f"{fault.why}{before}; look for the cause (data, learning rate, the device that is named), or"
                f" give --recovery.rollbacks {self.most + 1}"
            )
        newest = fault.step - 1
        if self._restored and fault.step - self._bad[-1] <= self._bad[-1] - self._restored[-1]:
            newest = min(newest, self._restored[-1] - 1)
        self._bad.append(fault.step)
        return newest

    def restored(self, step: int) -> None:
        """Record the step from which the run continues after a rollback."""
        if len(self._restored) < len(self._bad):
            self._restored.append(step)
