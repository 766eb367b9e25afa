"""Paired timing: blocks of steps of several sides, in random order, round after round, in one process.

Another program on the machine then slows all sides alike, and their ratio within a round stays.
"""

import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Side = Callable[[list[float]], None]
"""Runs one block. Appends `time.perf_counter()` to its argument at the beginning of each step."""


class Block(NamedTuple):
    """One block: the median of its steps, and wall and processor time of the whole, by step."""

    step_seconds: float
    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Many values in a few.

    Args:
      median: of the values.
      low: the first quartile.
      high: the third quartile.
      sure: where the median of endlessly many values lies, with a probability of 95 %.
    """

    median: float
    low: float
    high: float
    sure: tuple[float, float]


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles and an interval for the median, of two and more values.

    The interval is from order statistics (Conover, Practical Nonparametric Statistics, section 3.2),
    so it assumes no distribution.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.5, high=2.5, sure=(1.0, 3.0))
    """
    ordered, num = sorted(values), len(values)
    reach = 1.96 * math.sqrt(num) / 2
    below, above = max(0, math.floor(num / 2 - reach)), min(num - 1, math.ceil(num / 2 + reach))
    low, _, high = quantiles(ordered, n=4, method="inclusive")
    return Spread(median=median(ordered), low=low, high=high, sure=(ordered[below], ordered[above]))


def timed(side: Side, first: int) -> Block:
    """Run one block and time it.

    Args:
      side: what to run.
      first: steps at the beginning that are not among the steps whose median is taken: those in
        which nothing is waited for yet.
    """
    ticks: list[float] = []
    cpu_start, start = time.process_time(), time.perf_counter()
    side(ticks)
    wall_seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    steps = [end - begin for begin, end in pairwise(ticks)][first:]
    return Block(median(steps), wall_seconds / len(ticks), cpu_seconds / len(ticks))


def rounds(
    sides: Mapping[str, Side], num_rounds: int, first: int, seed: int, quiet: float = 1.0
) -> dict[str, list[Block]]:
    """Run every side once a round, each round in another order.

    Args:
      sides: name -> side.
      num_rounds: how often.
      first: as for `timed`.
      seed: of the orders.
      quiet: a round waits until other programs take less than this share of all processors, and is
        run again if they did not keep to it. It asks Linux; 1 does not ask.

    Returns:
      name -> its blocks, one a round.
    """
    order, generator = list(sides), random.Random(seed)
    blocks: dict[str, list[Block]] = {name: [] for name in sides}
    while len(blocks[order[0]]) < num_rounds:
        while quiet < 1 and others_share(partial(time.sleep, 1))[1] > quiet:
            pass
        generator.shuffle(order)
        found, share = others_share(lambda: [timed(sides[name], first) for name in order])
        if quiet >= 1 or share <= quiet:
            for name, block in zip(order, found, strict=True):
                blocks[name].append(block)
    return blocks


def others_share(work: Callable[[], T]) -> tuple[T, float]:
    """What some work returns, and the share of all processors that other programs took meanwhile.

    Where there is no /proc/stat (not Linux) the share is 0.
    """
    before, began = _others_seconds(), time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - began
    return result, (_others_seconds() - before) / (elapsed * (os.cpu_count() or 1))


def _others_seconds() -> float:
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except FileNotFoundError:
        return 0.0
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def ratios(field: str, blocks: Sequence[Block], over: Sequence[Block]) -> Spread:
    """One time of one side over that of another, round by round.

    >>> a, b = Block(2.0, 3.0, 4.0), Block(1.0, 2.0, 4.0)
    >>> ratios("wall_seconds", [a, a, a], [b, b, b]).median
    1.5
    """
    return spread([getattr(x, field) / getattr(y, field) for x, y in zip(blocks, over, strict=True)])
