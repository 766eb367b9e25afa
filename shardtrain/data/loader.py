"""The rows of each batch that this process loads, as arrays on the mesh; padding has weight 0.

Which rows are padding is decided in `row_split.py`. Next: `placement.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardtrain.data.batches import Batch, Batches
from shardtrain.data.placement import place, process_rows
from shardtrain.data.row_split import RowSplit, fill_with_copies, weigh
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
      capacity: rows to pad the island's to; by default as few as can be split.

    Raises:
      ValueError: there is one island, which pads nothing, and its rows cannot be split.
    """
    # 1. the rows of the island; among several it pads them to what its mesh can split
    num_real = rows_of_islands[island]
    num_rows = num_real
    if len(rows_of_islands) > 1:
        split = RowSplit.of(mesh.shape, batch_axes, microbatches)
        num_rows = RowSplit({"data": multiple}).padded(num_real) if multiple else split.padded(num_real)
        num_rows = num_rows if capacity is None else capacity
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
      batches: made with `rows=shard.rows`.
      shard: the rows, see `batch_shard`.
      mesh: the mesh of this island.
      batch_axes: the mesh axes that split the rows of a microbatch.
      microbatches: M.
    """

    batches: Batches
    shard: BatchShard
    mesh: Mesh
    batch_axes: Sequence[str]
    microbatches: int

    @property
    def rows_of_microbatch(self) -> int:
        """The number of rows of this island in each microbatch, with padding."""
        return self.shard.num_rows // self.microbatches

    def place(self, batch: Batch) -> Any:
        """Put a batch that `batches` loaded on the mesh.

        Args:
          batch: name -> array (n, ...), of this process's rows.

        Returns:
          name -> jax array (M, rows of the island / M, ...), see `placement.place`.
        """
        batch = {**batch, "weights": weigh(batch["weights"], self.shard.real)}
        return place(batch, self.mesh, self.batch_axes, self.microbatches, self.shard.num_rows)
