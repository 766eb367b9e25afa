"""The batches of a run, from a position in the data on; the rows of this process can change between two.

Next: `loop.py`, which takes them.
"""

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from shardtrain.data import BatchShard, Loader, Position


class Feed:
    """An iterator over (batch on the mesh, the data position after it), while `reading`.

    Args:
      loader: of this process's rows.

    Attributes:
      loader: the same, of the rows that are read now.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
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
        batch, position = next(self._loaded)
        self._position = position
        self._num_read += 1
        return self.loader.place(batch), position

    def change(self, shard: BatchShard) -> None:
        """Read other rows of the batches that follow, or, if nothing is read yet, of all."""
        self._has_changed, is_reading = True, self._loaded is not None
        self._end()
        batches = replace(self.loader.batches, rows=shard.rows)
        self.loader = replace(self.loader, batches=batches, shard=shard)
        self._loaders.append((self._num_read, self.loader))
        if is_reading:
            self._begin(self._position)

    def loader_of(self, number: int) -> Loader:
        """Return the loader that read a batch, by its number since reading began, from 0."""
        return next(loader for first, loader in reversed(self._loaders) if first <= number)

    def take_change(self) -> bool:
        """Return whether the rows have changed since the last call, so that a step may be compiled."""
        found, self._has_changed = self._has_changed, False
        return found

    def _begin(self, position: Position | None) -> None:
        self._position, self._loaded = position, self.loader.batches.iterate(position)

    def _end(self) -> None:
        if self._loaded is not None:
            with closing(self._loaded):
                self._loaded = None
