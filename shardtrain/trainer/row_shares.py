"""The rows of each batch that the islands get: by weights, by their devices, or by their measured speed.

Next: `feed.py`, which reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax.sharding import Mesh

from shardtrain.data import BatchShard, batch_shard
from shardtrain.islands.measured_shares import MeasuredShares
from shardtrain.system.untrusted_files import whole_number
from shardtrain.trainer.coordination import Coordination

ROWS, MOST_ROWS = "rows", 1 << 31
"""Key in a checkpoint, and the largest number there."""


class RowShares:
    """The rows of each island; with "auto" they follow the measured speed of the islands.

    Args:
      coordination: the exchange with the other islands.
      batch: rows of a whole batch.
      shares: see `islands.options.Across`.
      mesh, batch_axes, microbatches: of this island.

    Raises:
      ValueError: see `Coordination.split`.
    """

    def __init__(
        self,
        coordination: Coordination,
        batch: int,
        shares: Sequence[float] | Literal["auto"] | None,
        mesh: Mesh,
        batch_axes: Sequence[str],
        microbatches: int,
    ) -> None:
        weights = None if isinstance(shares, str) else shares
        self._split = coordination.split(batch, weights, mesh, batch_axes, microbatches)
        self._mesh, self._batch_axes, self._microbatches = mesh, batch_axes, microbatches
        self._measured: MeasuredShares | None = None
        if shares == "auto" and len(self._split.rows) > 1:
            self._measured = MeasuredShares(batch, self._split.rows, self._split.multiples)

    def shard(self) -> BatchShard:
        """Return the rows that this process loads from now on."""
        rows, own = self._split.rows, self._split.own
        capacity = None
        if self._measured is not None:
            # few numbers of rows, with padding, so that few programs are compiled
            rows, capacity = self._measured.rows, self._measured.capacities[own]
        multiple = self._split.multiples[own]
        return batch_shard(rows, own, self._mesh, self._batch_axes, self._microbatches, multiple, capacity)

    def saved(self) -> dict[str, list[int]]:
        """Return what a checkpoint holds of the rows: those of each island, if they were measured."""
        return {} if self._measured is None else {ROWS: list(self._measured.rows)}

    def restore(self, extra: Mapping[str, Any]) -> str | None:
        """Go on with the rows in a checkpoint; return a line if it has any for these islands and this batch.

        Args:
          extra: what the checkpoint holds beside arrays.

        Raises:
          ValueError: the rows there are no whole numbers.
        """
        if self._measured is None or not isinstance(saved := extra.get(ROWS), list):
            return None
        rows = [whole_number(each, ROWS, MOST_ROWS) for each in saved]
        if rows == self._measured.rows or not self._measured.restore(rows):
            return None
        return f"rows of the islands, as they were measured before: {', '.join(map(str, rows))}"

    def own_share(self) -> float:
        """Return the part of the rows of a batch that this island has."""
        rows = self._split.rows if self._measured is None else self._measured.rows
        return rows[self._split.own] / sum(rows)

    def add(self, seconds: Sequence[float]) -> str | None:
        """Add a step; return what changes before the next one, or None.

        Args:
          seconds: of each island's own work in the step, the same on all ranks.
        """
        measured = self._measured
        if measured is None or not measured.add(seconds):
            return None
        before, expected = measured.seconds
        return (
            f"rows of the islands from now on: {', '.join(map(str, measured.rows))}; the slowest took"
            f" {before:.3g} s a step, expected are {expected:.3g} s"
        )
