"""Find the largest batch of which some layout fits, or the batch with the most examples a second.

Every size is a search of islands (`pools.py`), by the programs that were traced for the run's own batch.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardtrain.plan.pools import Pool
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import divisors

GOALS = ("max", "fastest")
"""The largest batch that fits, and the smallest that is about as fast as any."""

CLOSE = 0.97
"""Part of the most examples a second that the fastest batch may lack, to be a smaller one."""

FINEST = 32
"""The largest power of 2 below a batch is divided by this at most: many layouts split its multiples."""


class ChosenBatch(NamedTuple):
    """A number of rows, and why it was chosen."""

    rows: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The batches to try.

    Args:
      plan: subjects of each kind of islands and space -> the islands to use; ValueError if nothing runs.
      subjects: the subjects.
      space: the choices of a search.
      accumulate: microbatches of a step of the largest batch: with enough of them, any batch fits.
      multiple: rows that all layouts of this machine can split into these microbatches.
      most: rows of the largest batch, such as the samples of the data.
    """

    plan: Callable[[Sequence[Subject], Space], Pool]
    subjects: Sequence[Subject]
    space: Space
    accumulate: int
    multiple: int
    most: int

    def _plan(self, rows: int, space: Space) -> Pool:
        return self.plan([each.resize(rows) for each in self.subjects], space)

    def find(self, goal: str) -> ChosenBatch:
        """Return the batch of one of `GOALS`; if not even the smallest fits, the smallest."""
        space, rates = self.space, dict[int, float]()
        if goal == "max":
            space = replace(space, accumulates=(self.accumulate,))

        def rate(rows: int) -> float:
            """Return the examples a second; 0 if they do not fit or run."""
            if rows not in rates:
                rates[rows] = 0.0
                with suppress(ValueError):
                    # seconds are inf if nothing fits
                    rates[rows] = rows / self._plan(rows, space).seconds
            return rates[rows]

        # fewer rows than devices are split over tensor and pipeline
        units = [rows for rows in reversed(divisors(self.multiple)) if rows <= self.most]
        unit = next(filter(rate, units), None)
        if unit is None:
            # what cannot run at all is an error of its own
            self._plan(units[-1], space)
            return ChosenBatch(units[-1], "not even this batch fits; use more devices or a smaller model")
        # of a divisor no multiple is tried: the next one does not fit
        end = self.most // unit + 1 if unit == units[0] else 2
        if goal == "max":
            last, step = _find_last(lambda number: rate(number * unit) > 0, 1, end)
            why = f"the largest that fits with --accumulate {self.accumulate}"
            why = "all of the data" if last + step >= end > 2 else why
            return ChosenBatch(last * unit, f"{why}, in multiples of {step * unit}")
        number = 1
        while 2 * number < end and rate(2 * number * unit):
            number *= 2
        enough = CLOSE * max(rates.values())
        close = min(rows for rows in rates if rates[rows] >= enough) // unit
        found = sum(_find_last(lambda number: rate(number * unit) < enough, close // 2, close)) * unit
        best = max(rates, key=lambda rows: rates[rows])
        part = rates[found] / rates[best]
        return ChosenBatch(found, f"{part:.1%} of the examples a second of {best}, the most that were tried")


def _find_last(holds: Callable[[int], bool], first: int, end: int) -> tuple[int, int]:
    """Return the last number before `end` for which something holds, and a step of which it is a multiple.

    It holds for `first`, 0 or a power of 2.

    >>> _find_last(lambda number: number < 30, 1, 1000), _find_last(lambda number: number < 5534, 1, 10000)
    ((29, 1), (5504, 128))
    """
    while 0 < 2 * first < end and holds(2 * first):
        first *= 2
    found, step, last_step = first, first, max(first // FINEST, 1)
    while step > last_step:
        step //= 2
        if found + step < end and holds(found + step):
            found += step
    return found, last_step
