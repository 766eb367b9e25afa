"""Balance the rows of islands by measured speed, so that all islands end a step together. Values only.

An island's own work in a step takes about a + b * rows seconds. Measurements at two numbers of rows give a
and b; until then a is 0. The rest of a step, sending and the update, counts as additional rows: it is
measured on the island that is last, because the others wait during it. An island is compiled for some numbers
of rows, its capacities, and pads rows up to them.

Source: Ding et al. 2021, HetSeq (unequal islands in one run); Song et al. 2020, AccPar, section 4 (shares in
the ratio of the speeds).
"""

import math
from collections.abc import Sequence
from statistics import median

WINDOW = 8
"""Number of steps of a median."""

SKIPPED = 2
"""Number of steps after a change that are not measured: the first one compiles."""

LEAST_GAIN, MORE_GAIN, MOST_GAIN = 0.05, 0.05, 0.15
"""Fractions of the step time that a change must save. The first two changes must save `LEAST_GAIN`: less is
noise, and a new capacity must be compiled. Each later change must save `MORE_GAIN` more, up to `MOST_GAIN`,
because compilations for noise never pay off. The second change corrects for time that rows do not affect,
which is unknown before the first."""

FINENESS = 16
"""A capacity is at most the fraction 1 / FINENESS above the one before, which bounds padding."""

CHANGED = 0.15
"""Largest relative deviation from an older measurement; beyond it the older one is dropped as outdated."""


def capacities(most: int, multiple: int, limit: float = math.inf) -> list[int]:
    """Return the numbers of rows for which an island may be compiled; the last one is at least `most`.

    Args:
      most: largest number of rows.
      multiple: number of rows that the island's mesh splits without padding; capacities are multiples of it,
        each at most 1 / `FINENESS` above the one before, where that is possible.
      limit: the largest capacity, a multiple too; it may be below `most`.

    >>> capacities(37, 1)[-6:], capacities(24, 4), capacities(24, 4, 12)
    ([30, 31, 32, 34, 36, 38], [4, 8, 12, 16, 20, 24], [4, 8, 12])
    """
    found = [multiple]
    while found[-1] < min(most, limit):
        step = max(found[-1] // FINENESS // multiple, 1) * multiple
        found.append(int(min(found[-1] + step, limit)))
    return found


def capacity(rows: int, multiple: int, limit: float = math.inf) -> int:
    """Return the least capacity that holds some rows.

    >>> capacity(35, 1), capacity(0, 4), capacity(35, 1, limit=35)
    (36, 4, 35)
    """
    return capacities(rows, multiple, limit)[-1]


class Speed:
    """The measured speed of an island: seconds of its own work in a step, by capacity.

    >>> speed = Speed()
    >>> speed.add(8, 1.0)
    >>> speed.seconds(16)
    2.0
    >>> speed.add(16, 1.8)
    >>> round(speed.seconds(24), 6)
    2.6
    """

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}

    def add(self, capacity: int, seconds: float) -> None:
        """Record the median seconds of a step at a capacity."""
        for other, before in list(self._measured.items()):
            # at one speed more rows take longer, but at most in proportion
            least, most = sorted((1.0, capacity / other))
            if not least * (1 - CHANGED) <= seconds / before <= most * (1 + CHANGED):
                del self._measured[other]
        # as much of the windows before as of this one: half of the noise, and a slow drift is followed
        self._measured[capacity] = (self._measured.get(capacity, seconds) + seconds) / 2

    def seconds(self, capacity: int) -> float:
        """Return the expected seconds of a step at a capacity."""
        # on the line through the two nearest that were measured, one at each side where there is one
        below = sorted(n for n in self._measured if n <= capacity)
        above = sorted(n for n in self._measured if n >= capacity)
        if below and above:
            near, far = below[-1], above[0]
        else:
            near, far, *_ = [*reversed(below), *above] * 2
        per_row = self._measured[near] / near
        if near != far:
            slope = (self._measured[far] - self._measured[near]) / (far - near)
            # outside of them noise may not say that rows cost nothing, or that nothing else costs
            per_row = slope if near < capacity < far else min(max(slope, per_row / 4), per_row)
        return self._measured[near] + per_row * (capacity - near)


def balance_rows(
    num_rows: int, speeds: Sequence[Speed], multiples: Sequence[int], limits: Sequence[float] | None = None
) -> list[int]:
    """Return the rows of each island that minimise the time of the slowest; they add up to the batch.

    An island computes at least its smallest capacity, filled with padding if it gets no rows.

    Args:
      num_rows: B, rows of the whole batch.
      speeds: speed of each island, with at least one measurement.
      multiples: see `capacities`.
      limits: largest number of rows of each island; their sum is at least B. None disables them.

    >>> fast, slow = Speed(), Speed()
    >>> fast.add(16, 1.0), slow.add(16, 2.0)
    (None, None)
    >>> balance_rows(32, [fast, slow], [1, 1])
    [21, 11]
    >>> balance_rows(32, [fast, slow], [1, 1], [18, 32])
    [18, 14]
    """
    limits = [math.inf] * len(multiples) if limits is None else limits
    ladders = [
        capacities(num_rows, multiple, limit) for multiple, limit in zip(multiples, limits, strict=True)
    ]
    seconds = [[speed.seconds(c) for c in ladder] for speed, ladder in zip(speeds, ladders, strict=True)]
    # the least time in which the islands together have room for all rows
    least = max(each[0] for each in seconds)
    room: list[int] = []
    for limit in sorted({x for each in seconds for x in each if x >= least}):
        room = [
            max(c for c, x in zip(ladder, each, strict=True) if x <= limit)
            for ladder, each in zip(ladders, seconds, strict=True)
        ]
        if sum(room) >= num_rows:
            break
    # take the surplus from the islands with the most rows
    rest = sum(room) - num_rows
    for island in sorted(range(len(room)), key=lambda island: -room[island]):
        taken = min(rest, room[island])
        room[island], rest = room[island] - taken, rest - taken
    return room


class MeasuredShares:
    """The rows of each island, which change when measured speeds promise a faster step.

    All ranks pass the same seconds, and so compute the same rows without communication. The rows change only
    if two consecutive windows promise a gain: a disturbance of a few steps has no effect.

    Args:
      num_rows: B, rows of the whole batch.
      rows: rows of each island at the start; they add up to B.
      multiples: of each island, see `capacities`.
      limits: of each island, see `balance_rows`.

    Attributes:
      rows: the current rows of each island.
      seconds: seconds of a step before the last change, and the expected seconds after it.

    >>> shares = MeasuredShares(32, [16, 16], [1, 1])
    >>> changes = [shares.add([0.1 * shares.rows[0], 0.2 * shares.rows[1]]) for _ in range(40)]
    >>> shares.rows, changes.index(True)
    ([21, 11], 17)
    """

    def __init__(
        self,
        num_rows: int,
        rows: Sequence[int],
        multiples: Sequence[int],
        limits: Sequence[float] | None = None,
    ) -> None:
        self._num_rows, self._multiples = num_rows, list(multiples)
        self._limits = [math.inf] * len(rows) if limits is None else list(limits)
        self._speeds = [Speed() for _ in rows]
        self._steps: list[tuple[Sequence[float], Sequence[float]]] = []
        # of each island that came last in a window, the rows that take as long as what follows its own work
        self._rest_rows: dict[int, float] = {}
        self._pays, self._changes = False, 0
        self.rows, self.seconds = list(rows), (0.0, 0.0)

    def _measure_whole_steps(self) -> list[float]:
        """Return the median seconds of each island's step, without waiting for others."""
        own, rests = (
            [median(each) for each in zip(*kind, strict=True)]
            for kind in zip(*self._steps[SKIPPED:], strict=True)
        )
        per_row = [x / n for x, n in zip(own, self.capacities, strict=True)]

        def whole(island: int, others: float = 0.0) -> float:
            return own[island] + self._rest_rows.get(island, others) * per_row[island]

        last = max(range(len(own)), key=whole)
        self._rest_rows[last] = rests[last] / per_row[last]
        return [whole(island, self._rest_rows[last]) for island in range(len(own))]

    def _slowest_seconds(self) -> float:
        """Return the expected seconds of a step with the current rows."""
        return max(speed.seconds(now) for speed, now in zip(self._speeds, self.capacities, strict=True))

    @property
    def capacities(self) -> list[int]:
        """The rows of each island with padding."""
        each = zip(self.rows, self._multiples, self._limits, strict=True)
        return [capacity(n, multiple, limit) for n, multiple, limit in each]

    def restore(self, rows: Sequence[int]) -> bool:
        """Continue with the rows of a checkpoint if these islands can have them; else return False.

        >>> shares = MeasuredShares(32, [16, 16], [1, 1])
        >>> shares.restore([21, 11]), shares.rows, shares.restore([16, 8, 8])
        (True, [21, 11], False)
        """
        if len(rows) != len(self.rows) or sum(rows) != self._num_rows:
            return False
        if any(n > limit for n, limit in zip(rows, self._limits, strict=True)):
            return False
        self.rows, self._steps, self._pays = list(rows), [], False
        return True

    def add(self, seconds: Sequence[float], rest_seconds: Sequence[float] | None = None) -> bool:
        """Add a step; return whether the rows change before the next one.

        Args:
          seconds: seconds of each island's own work, without waiting for others.
          rest_seconds: seconds of each island after its own work; None means 0.
        """
        self._steps.append((seconds, rest_seconds or [0.0] * len(seconds)))
        if len(self._steps) < SKIPPED + WINDOW:
            return False
        for speed, now, x in zip(self._speeds, self.capacities, self._measure_whole_steps(), strict=True):
            speed.add(now, x)
        rows = balance_rows(self._num_rows, self._speeds, self._multiples, self._limits)
        measured, before, self.rows = self._slowest_seconds(), self.rows, rows
        expected = self._slowest_seconds()
        gain = min(LEAST_GAIN + MORE_GAIN * max(self._changes - 1, 0), MOST_GAIN)
        pays = rows != before and expected <= measured * (1 - gain)
        changes, self._pays = pays and self._pays, pays and not self._pays
        if not changes:
            # the next window has no step that compiles
            self.rows, self._steps = before, list(self._steps[-SKIPPED:])
            return False
        self._steps, self.seconds = [], (measured, expected)
        self._changes += 1
        return True
