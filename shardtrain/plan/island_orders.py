"""List the ways to form pipelines of islands: which kinds are together, and in which order. No jax.

Next: `island_stages.py`, which predicts them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

MOST_LISTED, MOST_ORDERS = 12, 200
"""Up to this number of islands and of orders all are tried; else only those of HetPipe's distributions."""

Islands = tuple[tuple[int, ...], ...]
"""The kind of the island of each stage, for each pipeline."""


def name_distribution(islands: Islands) -> str:
    """Name a distribution: "node" if each pipeline has one kind, "equal" if all have the same kinds.

    >>> [name_distribution(each) for each in (((0, 0), (1, 1)), ((0, 1), (1, 0)), ((0, 1), (0, 2)))]
    ['node', 'equal', 'hybrid']
    """
    if all(len(set(each)) == 1 for each in islands):
        return "node"
    return "equal" if len({tuple(sorted(each)) for each in islands}) == 1 else "hybrid"


def list_arrangements(kinds: Sequence[int], num_stages: int) -> set[Islands]:
    """Return the ways to form pipelines of `num_stages` islands; the order of the pipelines is no matter.

    Args:
      kinds: the kind of each island, the fastest first.
      num_stages: a divisor of their number.

    >>> sorted(list_arrangements([0, 1, 1, 1], 2))
    [((0, 1), (1, 1)), ((1, 0), (1, 1))]
    """
    same = map(math.factorial, Counter(kinds).values())
    if len(kinds) <= MOST_LISTED and math.factorial(len(kinds)) // math.prod(same) <= MOST_ORDERS:
        orders = _list_orders(tuple(kinds))
    else:
        number, half = len(kinds) // num_stages, num_stages // 2
        equal = [kind for first in range(number) for kind in kinds[first::number]]
        # HetPipe's hybrid distribution joins the fastest islands and the slowest
        fast, slow, rest = kinds, kinds[::-1], num_stages - half
        joined = [[*fast[i * half :][:half], *slow[i * rest :][:rest]] for i in range(number)]
        hybrid = [kind for each in joined for kind in each]
        orders = [each for order in (kinds, equal, hybrid) for each in (order, order[::-1])]
    return {
        tuple(sorted(tuple(order[i : i + num_stages]) for i in range(0, len(kinds), num_stages)))
        for order in orders
    }


def _list_orders(kinds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not kinds:
        yield ()
    for kind in dict.fromkeys(kinds):
        at = kinds.index(kind)
        yield from ((kind, *rest) for rest in _list_orders(kinds[:at] + kinds[at + 1 :]))
