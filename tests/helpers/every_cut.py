"""Every way to cut blocks into parts, for references by brute force."""

from collections.abc import Iterator
from itertools import combinations, pairwise


def list_cuts(num_blocks: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of blocks of each part, of one block or more."""
    for inner in combinations(range(1, num_blocks), num_parts - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, num_blocks)))
