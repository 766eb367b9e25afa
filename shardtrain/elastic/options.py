"""Options of a run whose islands come and go. No jax, no sockets."""

import re
from dataclasses import dataclass
from typing import Any

from shardtrain.elastic.epoch import BatchRule
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse

MOST_SLOTS = 4096


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Islands that come and go while a run trains, without MPI between them.

    Args:
      islands: fewest and most islands that train together, such as 2..5. With fewer, the run saves and waits
        for others. Empty disables it.
      slots: number of parts of a batch that islands share by speed, at least the most islands; they are its
        microbatches. None takes the number of the run in the folder, or else about two for each of the most
        islands, or one if an island is a pipeline. With batch members, of the batch of each.
      batch: rows of a step. fixed: those of the batch; members: a batch for each island, so that steps with
        more islands read more, and the data is used up sooner.
      wait_minutes: longest time with fewer islands than that, after which the run ends with exit code 75.
      patience_seconds: an island that is silent for longer is let go by the others.

    Short form: the islands.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    islands: str = ""
    slots: int | None = None
    batch: BatchRule = "fixed"
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
        most_slots = MOST_SLOTS // self.most if self.grows else MOST_SLOTS
        if self.slots is not None and not self.sharers <= self.slots <= most_slots:
            problems.append(
                f"slots is {self.slots}, for {self.islands} islands with batch {self.batch!r}; use"
                f" {self.sharers} to {most_slots}, or other islands"
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

    @property
    def grows(self) -> bool:
        """Whether a step reads a batch for each island."""
        return bool(self.islands) and self.batch == "members"

    @property
    def sharers(self) -> int:
        """Largest number of islands for each batch that they share."""
        return 1 if self.grows else self.most

    def choose_slots(self, batch: int, microbatches: int = 1, each: int = 2) -> int:
        """Return the number of slots of a batch.

        Args:
          batch: rows of a batch.
          microbatches: number of parts in which the batch fits into memory.
          each: number of slots to choose for each of the most islands.

        Raises:
          ValueError: the batch has fewer rows than slots.

        >>> [Elastic(islands=islands).choose_slots(48) for islands in ("1..1", "2..5", "1..30")]
        [2, 12, 48]
        >>> Elastic(islands="2..5").choose_slots(48, each=1)
        6
        """
        slots, least = self.slots, min(max(each * self.sharers, microbatches), batch)
        if slots is None:
            # equal ones, if there are not many more of them
            slots = next((number for number in range(least, 2 * least) if batch % number == 0), least)
        fewest = max(self.sharers, microbatches)
        if not fewest <= slots <= batch:
            raise ValueError(
                f"a batch of {batch} rows has {slots} slots, for up to {self.sharers} islands and"
                f" {microbatches} microbatches; use --elastic.slots {fewest} to {batch}"
                if fewest <= batch
                else f"a batch of {batch} rows is too small for {fewest} slots"
            )
        return slots
