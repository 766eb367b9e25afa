"""Paired timing: several sides in turn, in random order, round after round, in one process or on all ranks.

Another program on the machine then slows all sides alike, and their ratio within a round stays.
"""

import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Side = Callable[[list[float]], Any]
"""Runs one block. Appends `time.perf_counter()` to its argument at the beginning of each step."""


class Block(NamedTuple):
    """The median of a block's steps, and wall and processor time of the whole, by step."""

    step_seconds: float
    wall_seconds: float
    cpu_seconds: float


class Spread(NamedTuple):
    """Median and quartiles of values, and the 95 % interval of the median of endlessly many."""

    median: float
    low: float
    high: float
    sure: tuple[float, float]

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.sure[0]:.3f} - {self.sure[1]:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Summarise two or more values.

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


def take_turns(
    calls: Mapping[str, Callable[[], T]], num_rounds: int, seed: int, quiet: float = 1.0
) -> dict[str, list[T]]:
    """Call every side once a round, each round in another order.

    Args:
      calls: name -> a call that measures itself.
      num_rounds: number of rounds.
      seed: of the orders.
      quiet: rounds in which other programs took more than this share of all processors are run again.
        It asks Linux; 1 takes all.

    Returns:
      Name -> results, one a round.
    """
    order, generator = list(calls), random.Random(seed)
    found: dict[str, list[T]] = {name: [] for name in calls}
    while len(found[order[0]]) < num_rounds:
        while quiet < 1 and share_of_others(partial(time.sleep, 1))[1] > quiet:
            pass
        generator.shuffle(order)
        results, share = share_of_others(lambda: [calls[name]() for name in order])
        if quiet >= 1 or share <= quiet:
            for name, result in zip(order, results, strict=True):
                found[name].append(result)
    return found


def share_of_others(work: Callable[[], T]) -> tuple[T, float]:
    """Return what some work returns, and the share of all processors that other programs took meanwhile."""
    before, own, began = busy_seconds(), time.process_time(), time.perf_counter()
    result = work()
    others = busy_seconds() - before - (time.process_time() - own)
    return result, others / ((time.perf_counter() - began) * (os.cpu_count() or 1))


def busy_seconds() -> float:
    """Return the processor seconds of this host that were not idle; 0 where there is no /proc/stat."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except FileNotFoundError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def time_block(side: Side, first: int) -> Block:
    """Run one block, and leave its first steps, in which nothing is waited for yet, out of the median."""
    ticks: list[float] = []
    cpu_start, start = time.process_time(), time.perf_counter()
    side(ticks)
    wall_seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    steps = [end - begin for begin, end in pairwise(ticks)][first:]
    return Block(median(steps), wall_seconds / len(ticks), cpu_seconds / len(ticks))


def time_rounds(
    sides: Mapping[str, Side], num_rounds: int, first: int, seed: int, quiet: float = 1.0
) -> dict[str, list[Block]]:
    """Time a block of every side in turn, see `take_turns` and `time_block`; one round warms up."""
    calls = {name: partial(time_block, side, first) for name, side in sides.items()}
    take_turns(calls, 1, seed)
    return take_turns(calls, num_rounds, seed, quiet)


def ratios(field: str, blocks: Sequence[Any], over: Sequence[Any]) -> Spread:
    """Return one time of one side over that of another, round by round.

    >>> a, b = Block(2.0, 3.0, 4.0), Block(1.0, 2.0, 4.0)
    >>> ratios("wall_seconds", [a, a, a], [b, b, b]).median
    1.5
    """
    return spread([getattr(x, field) / getattr(y, field) for x, y in zip(blocks, over, strict=True)])


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
