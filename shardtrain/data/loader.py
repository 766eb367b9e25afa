"""Load the rows of each batch that this process needs, and place them on the mesh; padding has weight 0.

`row_split.py` decides which rows are padding. Next: `placement.py`.
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
      rows: numbers of the rows in the whole batch, int (n,).
      real: bool (n,), False for padding, which is a copy of another row of the island.
      num_rows: number of rows of this island, with padding and with the rows of its other processes.
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
    """Return the rows of this process, with padding if the rows of its island cannot be split.

    Args:
      rows_of_islands: island (or pipeline of islands) -> its number of rows, see `split_over_islands`.
      island: the island of this process.
      mesh: the mesh of this island.
      batch_axes: the mesh axes that split the rows of a microbatch.
      microbatches: M.
      multiple: the island's rows must be a multiple of it; by default the multiple of this mesh.
      capacity: number of rows to pad the island to; by default the smallest number that can be split, if
        there are several islands; a single island is not padded.

    Raises:
      ValueError: the rows cannot be split, and nothing is padded.
    """
    # 1. the rows of the island; one of several islands pads them to a number that its mesh can split
    num_real = rows_of_islands[island]
    num_rows = num_real if capacity is None else capacity
    if capacity is None and len(rows_of_islands) > 1:
        split = RowSplit.of(mesh.shape, batch_axes, microbatches)
        num_rows = RowSplit({"data": multiple}).pad_rows(num_real) if multiple else split.pad_rows(num_real)
    # 2. the rows that the devices of this process hold
    local = process_rows(num_rows, mesh, batch_axes, microbatches)
    rows, real = fill_with_copies(local, num_real)
    # an island without rows loads row 0 of the batch, with weight 0
    start = shares.starts(rows_of_islands)[island]
    return BatchShard(rows=rows + start * bool(num_real), real=real, num_rows=num_rows, start=start)


@dataclass(frozen=True)
class Loader:
    """Load batches of this process's rows, and place them on the mesh.

    Args:
      batches: the batches, of the rows in `shards`; see `replace_shards`.
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
        """Return a loader for other rows of the same batches."""
        if isinstance(self.batches, TokenBatches):
            rows = {num_rows: shard.rows for num_rows, shard in shards.items()}
            return replace(self, batches=replace(self.batches, rows=rows), shards=shards)
        return replace(
            self, batches=replace(self.batches, rows=shards[self.batches.batch].rows), shards=shards
        )

    def shard(self, position: Position | None = None) -> BatchShard:
        """Return the rows of this process in the batch at a position; None means the first batch."""
        return self.shards[self.batches.num_rows(position)]

    def place(self, batch: Batch, position: Position | None = None) -> Any:
        """Put a batch that `batches` loaded on the mesh.

        Args:
          batch: name -> array (n, ...), of this process's rows.
          position: the position from which the batch was loaded; None means the first.

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
