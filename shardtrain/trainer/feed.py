"""Iterate over the batches of a run; the rows of this process and the batch size can change on the way.

Next: `loop.py`, which reads them.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from shardtrain.data import Batch, BatchShard, Loader, Position


class Feed:
    """An iterator over (batch on the mesh, data position after it); usable inside `reading`.

    Args:
      loader: the loader of this process's rows.
      later: number of steps done -> the loader of a larger batch from then on; rows then do not change.

    Attributes:
      loader: the current loader.
      num_rows: rows of the newest whole batch.
      first_row: the number of this island's first row in it.
    """

    def __init__(self, loader: Loader, later: Mapping[int, Loader] | None = None) -> None:
        self.loader = loader
        self._loader_after = {0: loader, **later} if later else {}
        self._step = 0
        self.num_rows, self.first_row = 0, 0
        self._row_counts: set[int] = set()
        self._position = Position(epoch=0, index=0)
        self._has_changed = False
        # number of batches read; (number of batches before, loader, position) for each loader in use
        self._num_read, self._loaders = 0, [(0, loader, self._position)]
        self._loaded: Generator[Any, None, None] | None = None

    @contextmanager
    def reading(self, position: Position, step: int = 0) -> Iterator[None]:
        """Load batches ahead until the end of the block.

        Args:
          position: the position of the first batch.
          step: number of steps done.
        """
        self._step = step
        if self._loader_after:
            self.loader = self._loader_after[max(first for first in self._loader_after if first <= step)]
        self._num_read, self._loaders = 0, [(0, self.loader, position)]
        self._begin(position)
        try:
            yield
        finally:
            self._end()

    def __iter__(self) -> Iterator[tuple[Any, Position]]:
        return self

    def __next__(self) -> tuple[Any, Position]:
        if self._loader_after.get(self._step, self.loader) is not self.loader:
            self._use(self._loader_after[self._step])
        assert self._loaded is not None
        placed, after = next(self._loaded)
        self.num_rows = self.loader.batches.num_rows(self._position)
        self.first_row = self.loader.shards[self.num_rows].start
        if self.num_rows not in self._row_counts:
            self._row_counts.add(self.num_rows)
            self._has_changed = True
        self._position = after
        self._num_read, self._step = self._num_read + 1, self._step + 1
        return placed, after

    def change(self, shards: Mapping[int, BatchShard]) -> None:
        """Read other rows of the batches that follow."""
        self._use(self.loader.replace_shards(shards))

    def _use(self, loader: Loader) -> None:
        is_reading = self._loaded is not None
        self._row_counts.clear()
        self._end()
        self.loader = loader
        self._loaders.append((self._num_read, loader, self._position))
        if is_reading:
            self._begin(self._position)

    def load(self, number: int) -> Batch:
        """Load a batch again by its number since reading began, from 0."""
        first, loader, position = next(each for each in reversed(self._loaders) if each[0] <= number)
        return loader.batches.load(loader.batches.advance(position, number - first))

    def take_change(self) -> bool:
        """Return whether the newest batches had a new number of rows, so that a step may be compiled."""
        found, self._has_changed = self._has_changed, False
        return found

    def _begin(self, position: Position) -> None:
        self._position, self._loaded = position, self.loader.iterate(position)

    def _end(self) -> None:
        if self._loaded is not None:
            with closing(self._loaded):
                self._loaded = None
