"""The batches of a run, from a position in the data on; the rows of this process can change between two.

Next: `loop.py`, which takes them.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from shardtrain.data import BatchShard, Loader, Position


class Feed:
    """An iterator over (batch on the mesh, the data position after it), while `reading`.

    Args:
      loader: of this process's rows.

    Attributes:
      loader: the same, of the rows that are read now.
      num_rows: rows of the whole batch that was given last.
      first_row: the number of this island's first row in it.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.num_rows, self.first_row = 0, 0
        self._row_counts: set[int] = set()
        self._position: Position | None = None
        self._has_changed = False
        # since reading began: how many batches, and before which of them the rows changed
        self._num_read, self._loaders = 0, [(0, loader)]
        self._loaded: Generator[Any, None, None] | None = None

    @contextmanager
    def reading(self, position: Position | None) -> Iterator[None]:
        """Load batches ahead, from a position on, until the end of the block."""
        self._num_read, self._loaders = 0, [(0, self.loader)]
        self._begin(position)
        try:
            yield
        finally:
            self._end()

    def __iter__(self) -> Iterator[tuple[Any, Position]]:
        return self

    def __next__(self) -> tuple[Any, Position]:
        assert self._loaded is not None
        placed, after = next(self._loaded)
        self.num_rows = self.loader.batches.num_rows(self._position)
        self.first_row = self.loader.shards[self.num_rows].start
        if self.num_rows not in self._row_counts:
            self._row_counts.add(self.num_rows)
            self._has_changed = True
        self._position = after
        self._num_read += 1
        return placed, after

    def change(self, shards: Mapping[int, BatchShard]) -> None:
        """Read other rows of the batches that follow, or, if nothing is read yet, of all."""
        is_reading = self._loaded is not None
        self._row_counts.clear()
        self._end()
        self.loader = self.loader.with_shards(shards)
        self._loaders.append((self._num_read, self.loader))
        if is_reading:
            self._begin(self._position)

    def loader_of(self, number: int) -> Loader:
        """Return the loader that read a batch, by its number since reading began, from 0."""
        return next(loader for first, loader in reversed(self._loaders) if first <= number)

    def take_change(self) -> bool:
        """Return whether a batch was given whose rows no earlier one had, so that a step may be compiled."""
        found, self._has_changed = self._has_changed, False
        return found

    def _begin(self, position: Position | None) -> None:
        self._position, self._loaded = position, self.loader.iterate(position)

    def _end(self) -> None:
        if self._loaded is not None:
            with closing(self._loaded):
                self._loaded = None
