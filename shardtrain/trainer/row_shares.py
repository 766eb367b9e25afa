"""The rows of each batch that the islands get: by weights, by their devices, or by their measured speed.

Next: `feed.py`, which reads them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from shardtrain.data import (
    Batches,
    BatchShard,
    Loader,
    RowSplit,
    TokenBatches,
    batch_shard,
    split_over_islands,
)
from shardtrain.islands.measured_shares import MeasuredShares, capacity
from shardtrain.system.untrusted_files import whole_number
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import Coordination

ROWS, MOST_ROWS = "rows", 1 << 31
"""Key in a checkpoint, and the largest number there."""


class RowShares:
    """The rows of each island; with "auto" they follow the measured speed of the islands.

    Args:
      coordination: the exchange with the other islands.
      row_counts: the numbers of rows that batches have: one, unless they are counted in tokens.
      run: its strategy says how rows are split.
      mesh: of this island.
      microbatches: parts of a batch that a program handles one after the other.

    Raises:
      ValueError: see `Coordination.split`; or one island cannot split the batch.
    """

    def __init__(
        self, coordination: Coordination, row_counts: Sequence[int], run: Run, mesh: Mesh, microbatches: int
    ) -> None:
        shares, self._batch_axes = run.strategy.across.shares, run.strategy.layout.batch_axes
        weights = None if isinstance(shares, str) else shares
        self._split = coordination.split(weights, mesh, self._batch_axes, microbatches)
        self._row_counts, self._mesh, self._microbatches = row_counts, mesh, microbatches
        # the numbers of rows of batches of tokens follow from lengths, so nobody can choose what divides
        self._pads = run.batch_unit == "tokens"
        if len(self._split.multiples) == 1 and not self._pads and coordination.islands is not None:
            unit = self._split.multiples[0]
            RowSplit({"data": unit // microbatches}, microbatches).check(row_counts[0])
        self._batch, self._measures = run.batch, shares == "auto" and len(self._split.multiples) > 1
        self._compiled: set[tuple[int, ...]] = set()
        limits = run.strategy.across.share_limits
        self.limit(None if isinstance(limits, str) else limits)

    def limit(self, limits: Sequence[int] | None) -> None:
        """Set the most that each island gets of a batch, in examples or tokens; None: no limit.

        Raises:
          ValueError: the islands together cannot hold a batch, or one cannot have what its mesh computes at
            least; or there are not as many limits as islands.
        """
        self._limits = limits
        if limits is not None and len(limits) != len(self._split.multiples):
            raise ValueError(
                f"share_limits has {len(limits)} numbers, and there are {len(self._split.multiples)} islands;"
                " give one each"
            )
        most = max(self._row_counts)
        self._measured: MeasuredShares | None = None
        if self._measures:
            rows, multiples = self._rows(most), self._split.multiples
            self._measured = MeasuredShares(most, rows, multiples, self._row_limits(most))

    @property
    def limits(self) -> Sequence[int] | None:
        """The most that each island gets of a batch, in examples or tokens; None: no limit."""
        return self._limits

    def _row_limits(self, num_rows: int) -> list[int] | None:
        """Return the most rows of each island in a batch of so many, multiples of what its mesh can split."""
        if self._limits is None:
            return None
        found = []
        for island, (limit, multiple) in enumerate(zip(self._limits, self._split.multiples, strict=True)):
            rows = limit * num_rows // self._batch
            if rows < multiple:
                raise ValueError(
                    f"island {island} may have {rows} of {num_rows} rows of a batch, and its mesh computes"
                    f" {multiple} at least; use a smaller mesh or fewer microbatches there, or leave it out"
                )
            found.append(rows // multiple * multiple)
        return found

    def loader(self, batches: Batches | TokenBatches) -> Loader:
        """Return the loader of the rows that this process has now."""
        loader = Loader(batches, {}, self._mesh, self._batch_axes, self._microbatches)
        return loader.with_shards(self.shards())

    def shards(self) -> dict[int, BatchShard]:
        """Return the rows that this process loads from now on, by the number of rows of the whole batch."""
        return {num_rows: self._shard(num_rows) for num_rows in self._row_counts}

    def _shard(self, num_rows: int) -> BatchShard:
        rows, own = self._rows(num_rows), self._split.own
        padded = self._pads or self._measured is not None
        return batch_shard(
            rows,
            own,
            self._mesh,
            self._batch_axes,
            self._microbatches,
            self._split.multiples[own],
            self._capacities(rows, num_rows)[own] if padded else None,
        )

    def _rows(self, num_rows: int) -> list[int]:
        """Return the rows of each island in a batch of so many."""
        if self._measured is None:
            return self._split.rows(num_rows, self._row_limits(num_rows))
        if num_rows == sum(self._measured.rows):
            return self._measured.rows
        limits = self._row_limits(num_rows)
        return split_over_islands(num_rows, self._measured.rows, self._split.multiples, limits)

    def _capacities(self, rows: Sequence[int], num_rows: int) -> list[int]:
        """Return these rows with padding: few numbers where they are measured, so that few are compiled."""
        multiples = self._split.multiples
        if self._measured is not None:
            limits = self._row_limits(num_rows) or [math.inf] * len(rows)
            return [capacity(*each) for each in zip(rows, multiples, limits, strict=True)]
        return [RowSplit({"data": each}).padded(n) for n, each in zip(rows, multiples, strict=True)]

    def limit_rows(self, rows: Sequence[int | None], num_rows: int) -> str | None:
        """Set the most rows of each island; return a line if any has a limit.

        Args:
          rows: of each island; None: no limit.
          num_rows: of the whole batch.

        Raises:
          ValueError: see `limit`.
        """
        fit = [num_rows if limit is None else min(limit, num_rows) for limit in rows]
        if min(fit) == num_rows:
            return None
        self.limit([-(-limit * self._batch // num_rows) for limit in fit])
        return f"most rows that fit the memory of each island, of {num_rows}: {', '.join(map(str, fit))}"

    @property
    def multiple(self) -> int:
        """The number of rows that this island's mesh splits without padding."""
        return self._split.multiples[self._split.own]

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
        rows = self._rows(max(self._row_counts))
        return rows[self._split.own] / sum(rows)

    def add(
        self, seconds: Sequence[float], num_rows: int, rest_seconds: Sequence[float] | None = None
    ) -> str | None:
        """Add a step; return what changes before the next one, or None.

        Args:
          seconds: of each island's own work in the step, the same on all ranks.
          num_rows: rows of its whole batch.
          rest_seconds: see `MeasuredShares.add`.
        """
        measured = self._measured
        if measured is None:
            return None
        most, found = max(self._row_counts), self._capacities(self._rows(num_rows), num_rows)
        if num_rows != most:
            # batches of tokens differ in their rows: what counts is the time for a part of a batch
            parts = zip(seconds, found, measured.capacities, strict=True)
            seconds = [x * (now / most) / (n / num_rows) for x, n, now in parts]
        # a step with numbers of rows that are new may have been compiled
        if len(self._row_counts) > 1 and (key := (num_rows, *found)) not in self._compiled:
            self._compiled.add(key)
            return None
        if not measured.add(seconds, rest_seconds):
            return None
        before, expected = measured.seconds
        return (
            f"rows of the islands from now on: {', '.join(map(str, measured.rows))}; the slowest took"
            f" {before:.3g} s a step, expected are {expected:.3g} s"
        )
