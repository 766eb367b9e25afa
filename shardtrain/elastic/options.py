"""Options of a run whose islands come and go. No jax, no sockets."""

import re
from dataclasses import dataclass
from typing import Any

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse

MOST_SLOTS = 4096


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Islands that come and go while a run trains, each a process of its own without MPI.

    Args:
      islands: fewest and most islands that train together, such as 2..5. With fewer, the run saves and waits
        for others. Empty disables it.
      slots: number of equal parts of a batch that islands share by speed; at least the most islands. None
        takes the smallest number that divides the batch and is at least twice the most islands.
      wait_minutes: longest time with fewer islands than that, after which the run ends with exit code 75.
      patience_seconds: an island that is silent for longer is let go by the others.

    Short form: the islands.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    islands: str = ""
    slots: int | None = None
    wait_minutes: float = 10.0
    patience_seconds: float = 10.0

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """Return the fields that a bare value sets, or None if it is not a short form."""
        return {"islands": value} if isinstance(value, str) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if not problems and self.islands:
            problems += self._problems()
        refuse("these elastic options cannot be used", problems)

    def _problems(self) -> list[str]:
        found = re.fullmatch(r"(\d{1,4})\.\.(\d{1,4})", self.islands)
        if not found or not 1 <= int(found[1]) <= int(found[2]) <= MOST_SLOTS:
            return [f"islands is {self.islands!r}; give the fewest and the most, such as 1..4"]
        problems = []
        if self.slots is not None and not self.most <= self.slots <= MOST_SLOTS:
            problems.append(
                f"slots is {self.slots}, and each of {self.most} islands needs one; use {self.most} to"
                f" {MOST_SLOTS}, or fewer islands"
            )
        if not self.wait_minutes >= 0:
            problems.append(f"wait_minutes is {self.wait_minutes}; use 0 or more")
        if not self.patience_seconds >= 1:
            problems.append(f"patience_seconds is {self.patience_seconds}; use 1 or more")
        return problems

    @property
    def fewest(self) -> int:
        """Fewest islands that train; 0 if the run is not elastic."""
        return int(self.islands.partition("..")[0] or 0)

    @property
    def most(self) -> int:
        """Most islands; 0 if the run is not elastic."""
        return int(self.islands.rpartition("..")[2] or 0)

    def choose_slots(self, batch: int) -> int:
        """Return the number of slots of a batch.

        Args:
          batch: rows of a batch.

        Raises:
          ValueError: the slots do not divide the batch, or it has fewer rows than islands.

        >>> [Elastic(islands=islands).choose_slots(48) for islands in ("1..1", "2..5", "1..30")]
        [2, 12, 48]
        """
        divisors = [number for number in range(1, batch + 1) if batch % number == 0]
        if self.slots is None:
            slots = next((each for each in divisors if each >= 2 * self.most), batch)
        else:
            slots = self.slots
        if slots not in divisors or slots < self.most:
            use = [each for each in divisors if each >= self.most][:4]
            fix = f"use --elastic.slots {' or '.join(map(str, use))}" if use else "use a larger batch"
            raise ValueError(
                f"a batch of {batch} rows has no {max(slots, self.most)} equal slots for up to {self.most}"
                f" islands; {fix}"
            )
        return slots
