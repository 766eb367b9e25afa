"""Draw from several sources in given proportions; each draw is computed without the earlier ones.

Draw n belongs to the source in whose part of [0, 1) the n-th multiple of the golden ratio falls, modulo 1. No
sequence is more even (its discrepancy grows as log n / n), and the number of earlier draws of a source is a
sum with a closed form. Next: `mixture.py`.

References:
  Kuipers and Niederreiter, Uniform Distribution of Sequences, 1974, chapter 2, section 3.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 times the golden ratio less 1, rounded to an odd number: all 2**64 multiples differ."""

BLOCK = 4096
"""Number of draws that are computed together."""


def compute_borders(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the start of each source's part of the interval [0, 2**64), and 2**64.

    >>> [border / WORD for border in compute_borders([3, 1])]
    [0.0, 0.75, 1.0]
    """
    total = sum(weights)
    return (0, *(round(part / total * WORD) for part in list(accumulate(weights))[:-1]), WORD)


@lru_cache(maxsize=64)  # several threads load neighbouring batches
def draw_block(parts: tuple[int, ...], offset: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the draws `block * BLOCK` to `(block + 1) * BLOCK`.

    Args:
      parts: see `compute_borders`.
      offset: start of the sequence, below 2**64.
      block: number of the block.

    Returns:
      The source of each draw, and the number of earlier draws of that source, int64 (BLOCK,).
    """
    first = block * BLOCK
    with np.errstate(over="ignore"):
        start = np.uint64((first * GOLDEN + offset) % WORD)
        points = start + np.arange(BLOCK, dtype=np.uint64) * np.uint64(GOLDEN)
    sources = np.searchsorted(np.array(parts[1:-1], np.uint64), points, "right")
    counts = np.empty(BLOCK, np.int64)
    for source in range(len(parts) - 1):
        mine = sources == source
        counts[mine] = count_before(parts, offset, source, first) + np.arange(mine.sum())
    return sources, counts


def count_before(parts: tuple[int, ...], offset: int, source: int, num_draws: int) -> int:
    """Return the number of draws of a source among the first `num_draws`.

    A point x is below c modulo 2**64 where floor(x / 2**64) - floor((x - c) / 2**64) is 1.

    >>> [count_before(compute_borders([3, 1]), 0, source, 1_000_000) for source in (0, 1)]
    [750001, 249999]
    """
    low, high = (floor_sum(num_draws, GOLDEN, offset - parts[source + i]) for i in (0, 1))
    return low - high


def floor_sum(num: int, step: int, start: int) -> int:
    """Return the sum of floor((start + step * m) / 2**64) over m from 0 to num - 1.

    It takes O(log step) operations, like Euclid's algorithm: whole parts are removed, then step and divisor
    are exchanged.

    >>> floor_sum(3, 1 << 63, 1 << 62)  # floor(1/4) + floor(3/4) + floor(5/4)
    1
    """
    total, divisor = 0, WORD
    while num > 0:
        whole, step = divmod(step, divisor)
        total += whole * num * (num - 1) // 2
        whole, start = divmod(start, divisor)
        total += whole * num
        # count the lattice points below the line along the other axis
        num, start = divmod(step * num + start, divisor)
        step, divisor = divisor, step
        if divisor == 0:
            break
    return total
