"""Find the largest batch of which some layout fits, or the batch with the most examples a second.

Every size is a search of layouts (`islands.py`), by the programs that were traced for the run's own batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.space import Space, list_allowed_remats
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import divisors

BatchGoal = Literal["max", "fastest"]

CLOSE = 0.97
"""Part of the most examples a second that the fastest batch may lack, to be a smaller one."""


class ChosenBatch(NamedTuple):
    """A number of rows, and why it was chosen."""

    rows: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The batches to try.

    Args:
      plan: subjects of each kind of islands and space -> the plan.
      subjects: the subjects.
      space: the choices of a search.
      accumulate: microbatches of a step of the largest batch: with enough of them, any batch fits.
      multiple: rows that all layouts of this machine can split into these microbatches.
      most: rows of the largest batch, such as the samples of the data.
    """

    plan: Callable[[Sequence[Subject], Space], ClusterPlan]
    subjects: Sequence[Subject]
    space: Space
    accumulate: int
    multiple: int
    most: int

    def find(self, goal: BatchGoal) -> ChosenBatch:
        """Return the batch of a goal; if not even the smallest fits, the smallest."""
        return self._find_largest() if goal == "max" else self._find_fastest()

    def _plan_rows(self, rows: int, space: Space) -> ClusterPlan:
        return self.plan([each.resize(rows) for each in self.subjects], space)

    def _find_largest(self) -> ChosenBatch:
        # whether anything fits is decided by the policies that recompute the most and the least
        remats = list_allowed_remats(self.subjects[0], self.space)
        ends = tuple(dict.fromkeys((remats[0], remats[-1])))
        space = replace(self.space, accumulates=(self.accumulate,), remats=ends)

        def fits(rows: int) -> bool:
            return self._plan_rows(rows, space).fits

        # fewer rows than devices are split over tensor and pipeline
        units = [rows for rows in reversed(divisors(self.multiple)) if rows <= self.most]
        unit = next((rows for rows in units if fits(rows)), None)
        if unit is None:
            return ChosenBatch(units[-1], "not even this batch fits; use more devices or a smaller model")
        # once the next divisor is known not to fit, no multiple of this one is tried
        most = self.most // unit if unit == units[0] else 1
        number = _find_last(lambda number: fits(number * unit), 1, most + 1)
        of_data = unit == units[0] and number == most
        reason = (
            "the most of the data"
            if of_data
            else f"the largest that fits with --accumulate {self.accumulate}"
        )
        return ChosenBatch(number * unit, f"{reason}, in multiples of {unit}")

    def _find_fastest(self) -> ChosenBatch:
        rates: dict[int, float] = {}

        def rate(rows: int) -> float:
            if rows not in rates:
                plan = self._plan_rows(rows, self.space)
                rates[rows] = rows / plan.seconds if plan.fits else 0.0
            return rates[rows]

        rows = unit = next((n for n in reversed(divisors(self.multiple)) if n <= self.most and rate(n)), 0)
        if not unit:
            return ChosenBatch(min(rates), "not even this batch fits; use more devices or a smaller model")
        while 2 * rows <= self.most and rate(2 * rows):
            rows *= 2
        best = max(rates, key=lambda each: (rates[each], -each))
        close = min(each for each in rates if rates[each] >= CLOSE * rates[best])
        slower = max((each for each in rates if each < close), default=0) // unit
        last = _find_last(lambda number: rate(number * unit) < CLOSE * rates[best], slower, close // unit)
        found = (last + 1) * unit
        best = max(rates, key=lambda each: rates[each])
        if found == best:
            return ChosenBatch(found, "the most examples a second of the batches that were tried")
        part = rates[found] / rates[best]
        return ChosenBatch(found, f"{part:.1%} of the examples a second of {best}, the most that were tried")


def _find_last(holds: Callable[[int], bool], first: int, end: int) -> int:
    """Return the last number before `end` for which something holds, which does for `first`.

    >>> _find_last(lambda number: number < 100, 1, 1000)
    99
    """
    while end - first > 1:
        # doubled at first, then halved
        middle = min(2 * first, (first + end) // 2)
        first, end = (middle, end) if holds(middle) else (first, middle)
    return first
