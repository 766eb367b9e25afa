"""The rows of each batch that this process loads, as arrays on the mesh; padding has weight 0.

Which rows are padding is decided in `row_split.py`. Next: `placement.py`.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardtrain.data.batches import Batches, Position
from shardtrain.data.placement import place, process_rows
from shardtrain.data.row_split import RowSplit, fill_with_copies, weigh
from shardtrain.data.samples import Batch
from shardtrain.data.token_batches import TokenBatches
from shardtrain.sharding import shares


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """The rows of each batch that this process loads.

    Args:
      rows: their numbers in the whole batch, int (n,).
      real: bool (n,), False for padding: a copy of another row of the island.
      num_rows: rows of this island, with padding and with those of its other processes.
      start: the number of the island's first row in the whole batch.
    """

    rows: np.ndarray
    real: np.ndarray
    num_rows: int
    start: int


def batch_shard(
    rows_of_islands: Sequence[int],
    island: int,
    mesh: Mesh,
    batch_axes: Sequence[str],
    microbatches: int,
    multiple: int | None = None,
    capacity: int | None = None,
) -> BatchShard:
    """Return the rows of this process, padded where those of its island cannot be split.

    Args:
      rows_of_islands: island (or pipeline of islands) -> its number of rows, see `split_over_islands`.
      island: which of them this process belongs to.
      mesh: the mesh of this island.
      batch_axes: the mesh axes that split the rows of a microbatch.
      microbatches: M.
      multiple: the number that the island's rows must be a multiple of; by default that of this mesh.
      capacity: rows to pad the island's to; by default as few as can be split among several islands, and
        none where there is one.

    Raises:
      ValueError: the rows cannot be split, and nothing is padded.
    """
    # 1. the rows of the island; among several it pads them to what its mesh can split
    num_real = rows_of_islands[island]
    num_rows = num_real if capacity is None else capacity
    if capacity is None and len(rows_of_islands) > 1:
        split = RowSplit.of(mesh.shape, batch_axes, microbatches)
        num_rows = RowSplit({"data": multiple}).pad_rows(num_real) if multiple else split.pad_rows(num_real)
    # 2. of these the rows that this process's devices hold
    local = process_rows(num_rows, mesh, batch_axes, microbatches)
    rows, real = fill_with_copies(local, num_real)
    # an island without rows loads row 0 of the batch, with weight 0
    start = shares.starts(rows_of_islands)[island]
    return BatchShard(rows=rows + start * bool(num_real), real=real, num_rows=num_rows, start=start)


@dataclass(frozen=True)
class Loader:
    """Batches of this process's rows, and their way onto the mesh.

    Args:
      batches: the batches, of the rows in `shards`; see `with_shards`.
      shards: number of rows of a whole batch -> the rows of this process, see `batch_shard`.
      mesh: the mesh of this island.
      batch_axes: the mesh axes that split the rows of a microbatch.
      microbatches: M.
    """

    batches: Batches | TokenBatches
    shards: Mapping[int, BatchShard]
    mesh: Mesh
    batch_axes: Sequence[str]
    microbatches: int

    def replace_shards(self, shards: Mapping[int, BatchShard]) -> "Loader":
        """Return a loader of other rows of the same batches."""
        if isinstance(self.batches, TokenBatches):
            rows = {num_rows: shard.rows for num_rows, shard in shards.items()}
            return replace(self, batches=replace(self.batches, rows=rows), shards=shards)
        return replace(
            self, batches=replace(self.batches, rows=shards[self.batches.batch].rows), shards=shards
        )

    def shard(self, position: Position | None = None) -> BatchShard:
        """Return the rows of this process in the batch at a position; None: the first batch."""
        return self.shards[self.batches.num_rows(position)]

    def place(self, batch: Batch, position: Position | None = None) -> Any:
        """Put a batch that `batches` loaded on the mesh.

        Args:
          batch: name -> array (n, ...), of this process's rows.
          position: the position that it was loaded from; None: the first.

        Returns:
          name -> jax array (M, rows of the island / M, ...), see `placement.place`.
        """
        shard = self.shard(position)
        batch = {**batch, "weights": weigh(batch["weights"], shard.real)}
        return place(batch, self.mesh, self.batch_axes, self.microbatches, shard.num_rows)

    def iterate(self, position: Position | None = None) -> Generator[tuple[Any, Position]]:
        """Yield (batch on the mesh, the position after it), from a position on; see `Batches.iterate`."""
        with closing(self.batches.iterate(position)) as loaded:
            for batch, after in loaded:
                yield self.place(batch, position), after
                position = after
