"""Find the slices of stored arrays that make up a slice of the whole model's array. No jax.

Blocks and replicas may have been saved in other parts and in another order. Next: `reader.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from shardtrain.checkpoints.array_files import StoredArray
from shardtrain.checkpoints.manifest_entries import ArrayOrigin, Leaf

Index = tuple[Any, ...]


StoredSlice = tuple[Index, StoredArray | None, Index]
"""(index of a slice in the wanted array, the stored array that has it, the index there).

None stands for rows of padding, which are zeros."""


def find_stored_slices(
    pieces: Sequence[StoredArray],
    origin: ArrayOrigin,
    index: Index,
    replica: int,
    unseen: Callable[[str], ValueError],
) -> Iterator[StoredSlice]:
    """Find where each row of the wanted array is stored, in as few slices as possible.

    Args:
        pieces: the visible stored arrays of one path.
        origin: the origin of the wanted array.
        index: the wanted slice, without a dim that counts replicas.
        replica: the saved replica.
        unseen: missing part ("replica 1", "blocks [2]") -> the error to raise.

    Raises:
        ValueError: `unseen`.
    """
    # only arrays of this replica, or of all replicas, can hold it
    mine = [p for p in pieces if p.leaf.origin.replica in (None, replica)]
    if not mine:
        raise unseen(f"replica {replica}")
    lead = (replica,) if mine[0].leaf.origin.counts_replicas else ()
    # all blocks in order: one slice of one array
    if origin.rows is None and mine[0].leaf.origin.rows is None:
        yield (...,), mine[0], (*lead, *index)
        return
    # block -> (stored array, its row)
    places = {row: (piece, i) for piece in reversed(mine) for i, row in enumerate(_find_rows(piece.leaf))}
    rows = range(origin.num_rows or len(places)) if origin.rows is None else origin.rows
    chosen = list(rows[index[0]])
    if lost := [row for row in chosen if row >= 0 and row not in places]:
        raise unseen(f"blocks {lost}")
    # adjacent rows of one stored array are read as one slice
    for start, stop in _runs([places.get(row) for row in chosen]):
        target = (slice(start, stop), ...)
        if chosen[start] < 0:
            yield target, None, ()
            continue
        piece, first = places[chosen[start]]
        yield target, piece, (*lead, slice(first, first + stop - start), *index[1:])


def _find_rows(leaf: Leaf) -> Sequence[int]:
    """Return the block of each row of a stored array."""
    shape = leaf.shape[1:] if leaf.origin.counts_replicas else leaf.shape
    return range(shape[0]) if leaf.origin.rows is None else leaf.origin.rows


def _runs(places: Sequence[tuple[Any, int] | None]) -> Iterator[tuple[int, int]]:
    """Return runs of consecutive rows of one stored array, or of none: (start, stop).

    >>> list(_runs([("a", 1), ("a", 2), ("b", 3), None, None, ("a", 3)]))
    [(0, 2), (2, 3), (3, 5), (5, 6)]
    """

    def key(i: int) -> Any:
        place = places[i]
        return None if place is None else (id(place[0]), place[1] - i)

    for _, run in groupby(range(len(places)), key):
        numbers = list(run)
        yield numbers[0], numbers[-1] + 1
