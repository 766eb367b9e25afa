"""Minimise a sum of costs of single choices and of pairs of choices, exactly. No jax.

Dynamic programming over any graph, by eliminating one variable after the other (Bertele and Brioschi 1972,
Nonserial Dynamic Programming; Dechter 1999, bucket elimination). On a chain of n variables of 3 values it
makes 9 n additions. Next: `assignment.py`, which partitions layers by it.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

MOST_ENTRIES = 10_000_000
"""So many combinations of values that belong together are held in memory."""


def least_sum(
    single: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]
) -> tuple[float, tuple[int, ...]]:
    """Return the least sum and a value of each variable that gives it.

    Args:
      single: of each variable the cost of each of its values, float64 (V,).
      pairs: (variable, other variable) -> float64 (V, W), the cost of each two of their values.

    Raises:
      ValueError: too many variables depend on each other.

    >>> least_sum([np.array([0.0, 1.0]), np.array([0.0, 3.0])], {(0, 1): np.array([[5.0, 0.0], [1.0, 9.0]])})
    (2.0, (1, 0))
    """
    tables: list[tuple[tuple[int, ...], np.ndarray]] = [((i,), cost) for i, cost in enumerate(single)]
    tables += list(pairs.items())
    of_variable = {i: {n for n, (over, _) in enumerate(tables) if i in over} for i in range(len(single))}
    near: dict[int, set[int]] = {i: set() for i in range(len(single))}
    for a, b in pairs:
        near[a].add(b)
        near[b].add(a)
    size = [len(cost) for cost in single]
    width = {i: math.prod(size[j] for j in near[i]) for i in near}
    best: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    least = 0.0
    while width:
        # the variable on which the fewest others depend
        i = min(width, key=width.__getitem__)
        del width[i]
        over = (*sorted(near[i]), i)
        total = _total([tables[n] for n in of_variable[i]], over, size)
        best.append((i, over[:-1], total.argmin(axis=-1)))
        rest = total.min(axis=-1)
        for j in over[:-1]:
            of_variable[j] -= of_variable[i]
            near[j] = (near[j] | set(over)) - {i, j}
        if over[:-1]:
            tables.append((over[:-1], rest))
            for j in over[:-1]:
                of_variable[j].add(len(tables) - 1)
                width[j] = math.prod(size[k] for k in near[j])
        else:
            least += float(rest)
    chosen = [0] * len(single)
    for i, over, values in reversed(best):
        chosen[i] = int(values[tuple(chosen[j] for j in over)])
    return least, tuple(chosen)


def _total(
    tables: Sequence[tuple[tuple[int, ...], np.ndarray]], over: tuple[int, ...], size: Sequence[int]
) -> np.ndarray:
    """Return the sum of tables as one over all their variables."""
    shape = [size[j] for j in over]
    if math.prod(shape) > MOST_ENTRIES:
        raise ValueError(
            f"{len(over)} layers depend on each other, which have {math.prod(shape):,} partitions together;"
            f" at most {MOST_ENTRIES:,} can be compared: use devices of equal speed, or fewer paths between"
            " layers"
        )
    total = np.zeros(shape)
    for variables, cost in tables:
        order = sorted(range(len(variables)), key=lambda k: over.index(variables[k]))
        there = {variables[k]: size[variables[k]] for k in order}
        total += cost.transpose(order).reshape([there.get(j, 1) for j in over])
    return total
