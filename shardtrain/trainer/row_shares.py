"""Split the rows of each batch over islands: by weights, by their devices, or by their measured speed.

Next: `feed.py`, which reads them.
"""

import math
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
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
from shardtrain.errors.messages import refuse
from shardtrain.islands.measured_shares import MeasuredShares, capacity
from shardtrain.plan.devices import find_device
from shardtrain.report.quantities import bytes_text
from shardtrain.system.cgroup import limits
from shardtrain.system.untrusted_files import check_whole_number
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import Coordination

if TYPE_CHECKING:
    from shardtrain.trainer.prepared_run import PreparedRun  # which imports this module

ROWS, MOST_ROWS = "rows", 1 << 31
"""Key in a checkpoint, and the largest number there."""


class RowShares:
    """The rows of each island; with "auto" they follow the measured speed of the islands.

    Args:
      coordination: the exchange with the other islands.
      row_counts: the possible numbers of rows in a batch: one, unless batches are counted in tokens.
      run: the run, whose strategy gives the weights.
      mesh: the mesh of this island.
      microbatches: parts of a batch that a program handles one after the other.

    Attributes:
      limits: the largest share of a batch for each island, in examples or tokens; None without limits.

    Raises:
      ValueError: there are not as many weights as islands; or one island cannot split the batch.
    """

    def __init__(
        self, coordination: Coordination, row_counts: Sequence[int], run: Run, mesh: Mesh, microbatches: int
    ) -> None:
        shares, self._batch_axes = run.strategy.across.shares, run.strategy.layout.batch_axes
        weights = None if isinstance(shares, str) else shares
        unit = RowSplit.of(mesh.shape, self._batch_axes, microbatches).multiple
        self._weights, self._multiples, self._own = _find_weights(coordination, weights, mesh, unit)
        self._row_counts, self._mesh, self._microbatches = row_counts, mesh, microbatches
        # batches of tokens are padded: their numbers of rows follow from lengths, and may not divide; and
        # those of islands that come and go, whose meshes nobody knows before
        self._pads = run.batch_unit == "tokens" or bool(run.elastic.islands)
        if len(self._multiples) == 1 and not self._pads and coordination.islands is not None:
            RowSplit({"data": self._multiples[0] // microbatches}, microbatches).check(row_counts[0])
        self._batch, self._measures = run.batch, shares == "auto" and len(self._multiples) > 1
        self._compile: set[tuple[int, ...]] = set()
        limits = run.strategy.across.share_limits
        self.limit(None if isinstance(limits, str) else limits)

    def limit(self, limits: Sequence[int] | None) -> None:
        """Set the largest share of a batch for each island, in examples or tokens; None removes the limits.

        Raises:
          ValueError: the islands together cannot hold a batch, or a limit is below the fewest rows that the
            island's mesh can compute; or there are not as many limits as islands.
        """
        self.limits = limits
        if limits is not None and len(limits) != len(self._multiples):
            raise ValueError(
                f"share_limits has {len(limits)} numbers, and there are {len(self._multiples)} islands;"
                " give one each"
            )
        most = max(self._row_counts)
        self._measured: MeasuredShares | None = None
        if self._measures:
            rows, multiples = self._rows(most), self._multiples
            self._measured = MeasuredShares(most, rows, multiples, self._row_limits(most))

    def _row_limits(self, num_rows: int) -> list[int] | None:
        """Return the most rows of each island in a batch, as multiples of what its mesh can split."""
        if self.limits is None:
            return None
        found = []
        for island, (limit, multiple) in enumerate(zip(self.limits, self._multiples, strict=True)):
            rows = limit * num_rows // self._batch
            if rows < multiple:
                raise ValueError(
                    f"island {island} may have {rows} of {num_rows} rows of a batch, and its mesh computes at"
                    f" least {multiple}; use a smaller mesh or fewer microbatches there, or leave it out"
                )
            found.append(rows // multiple * multiple)
        return found

    def loader(self, batches: Batches | TokenBatches) -> Loader:
        """Return the loader of the rows that this process has now."""
        loader = Loader(batches, {}, self._mesh, self._batch_axes, self._microbatches)
        return loader.replace_shards(self.shards())

    def shards(self) -> dict[int, BatchShard]:
        """Return the rows that this process loads, by the number of rows of the whole batch."""
        return {num_rows: self._shard(num_rows) for num_rows in self._row_counts}

    def _shard(self, num_rows: int) -> BatchShard:
        rows, own = self._rows(num_rows), self._own
        padded = self._pads or self._measured is not None
        return batch_shard(
            rows,
            own,
            self._mesh,
            self._batch_axes,
            self._microbatches,
            self._multiples[own],
            self._capacities(rows, num_rows)[own] if padded else None,
        )

    def _rows(self, num_rows: int) -> list[int]:
        """Return the rows of each island in a batch."""
        measured = self._measured
        if measured is not None and num_rows == sum(measured.rows):
            return measured.rows
        weights, limits = measured.rows if measured else self._weights, self._row_limits(num_rows)
        return split_over_islands(num_rows, weights, self._multiples, limits)

    def _capacities(self, rows: Sequence[int], num_rows: int) -> list[int]:
        """Return the padded rows; measured rows get one of few numbers, so that few programs are compiled."""
        multiples = self._multiples
        if self._measured is not None:
            limits = self._row_limits(num_rows) or [math.inf] * len(rows)
            return [capacity(*each) for each in zip(rows, multiples, limits, strict=True)]
        return [RowSplit({"data": each}).pad_rows(n) for n, each in zip(rows, multiples, strict=True)]

    @property
    def multiple(self) -> int:
        """The number of rows that this island's mesh splits without padding."""
        return self._multiples[self._own]

    def saved(self) -> dict[str, list[int]]:
        """Return the extra data of a checkpoint: the rows of each island, if they are measured."""
        return {} if self._measured is None else {ROWS: list(self._measured.rows)}

    def restore(self, extra: Mapping[str, Any]) -> str | None:
        """Restore the rows in a checkpoint; return a line if they fit these islands and this batch.

        Args:
          extra: the extra data of the checkpoint.

        Raises:
          ValueError: the rows there are no whole numbers.
        """
        if self._measured is None or not isinstance(saved := extra.get(ROWS), list):
            return None
        rows = [check_whole_number(each, ROWS, MOST_ROWS) for each in saved]
        if rows == self._measured.rows or not self._measured.restore(rows):
            return None
        return f"rows of the islands, as they were measured before: {', '.join(map(str, rows))}"

    def own_share(self) -> float:
        """Return this island's fraction of the rows of a batch."""
        rows = self._rows(max(self._row_counts))
        return rows[self._own] / sum(rows)

    def add(
        self, seconds: Sequence[float], num_rows: int, rest_seconds: Sequence[float] | None = None
    ) -> str | None:
        """Add the times of a step; return a line if the rows change before the next one, or None.

        Args:
          seconds: seconds of each island's own work in the step, the same on all ranks.
          num_rows: rows of the whole batch.
          rest_seconds: see `MeasuredShares.add`.
        """
        measured = self._measured
        if measured is None:
            return None
        most, found = max(self._row_counts), self._capacities(self._rows(num_rows), num_rows)
        if num_rows != most:
            # batches of tokens differ in their rows, so scale the times to the largest batch
            parts = zip(seconds, found, measured.capacities, strict=True)
            seconds = [x * (now / most) / (n / num_rows) for x, n, now in parts]
        # a step with new numbers of rows may have been compiled
        if len(self._row_counts) > 1 and (key := (num_rows, *found)) not in self._compile:
            self._compile.add(key)
            return None
        if not measured.add(seconds, rest_seconds):
            return None
        before, expected = measured.seconds
        return (
            f"rows of the islands from now on: {', '.join(map(str, measured.rows))}; the slowest took"
            f" {before:.3g} s a step, expected are {expected:.3g} s"
        )


def _find_weights(
    coordination: Coordination, weights: Sequence[float] | None, mesh: Mesh, unit: int
) -> tuple[Sequence[float], list[int], int]:
    """Find how the rows of batches are split over islands, or over pipelines of islands.

    Args:
      coordination: the exchange with the other islands.
      weights: the weight of each island's share; None takes the peak rates of its devices if those of all
        islands are known, else their number.
      mesh: of this island.
      unit: the number of rows that it can split without padding.

    Returns:
      The weight of each, the number of rows that each can split without padding, and the index of this one.
    """
    if coordination.islands is None:
        if weights is not None and len(weights) != 1:
            raise ValueError(
                f"shares has {len(weights)} weights, and this run has one island: leave --shares out, or"
                f" start {len(weights)} islands: shardtrain launch --islands {len(weights)} -- train ..."
            )
        return [1], [unit], 0
    device = find_device(mesh.devices.flat[0].device_kind)
    rate = device and device.matrix_flops_per_second
    found = coordination.all_gather_islands("rows", [mesh.devices.size, unit, rate])
    rates_known = all(rate for _, _, rate in found)
    found = [[n * rate if rates_known else n, unit] for n, unit, rate in found]
    own, grid = coordination.island, coordination.grid
    if grid is not None:
        # all stages of a pipeline work on the same rows
        pipelines = [grid.select_replica(found, i) for i in range(grid.num_replicas)]
        found = [[sum(n for n, _ in each), math.lcm(*(unit for _, unit in each))] for each in pipelines]
        own = grid.replica
    if weights is not None and len(weights) != len(found):
        raise ValueError(
            f"shares has {len(weights)} weights, and there are {len(found)}"
            f" {'islands' if grid is None else 'pipelines'}; give one each"
        )
    return weights or [n for n, _ in found], [unit for _, unit in found], own


class RowFit(NamedTuple):
    """The rows that fit the memory of an island.

    Args:
      rows: the most rows; None if the memory is not known or everything fits.
      least_bytes: memory of a device for the fewest rows.
      memory_bytes: memory of a device.
    """

    rows: int | None
    least_bytes: int = 0
    memory_bytes: int = 0


def fit_rows(program_bytes: Callable[[int], int], rows: int, multiple: int, memory_bytes: int) -> RowFit:
    """Compute how many rows fit, by a line through the memory of two programs.

    Args:
      program_bytes: rows -> memory of a device for the program of these rows, which is compiled.
      rows: the first rows of the island, whose program is needed anyway.
      multiple: the number of rows that the island's mesh splits without padding.
      memory_bytes: memory of a device.

    >>> fit_rows(lambda rows: 100 + 10 * rows, 8, 2, 245)
    RowFit(rows=14, least_bytes=120, memory_bytes=245)
    >>> fit_rows(lambda rows: 100 + 10 * rows, 8, 2, 110).rows
    0
    """
    other = rows if rows > multiple else 2 * multiple
    least, more = program_bytes(multiple), program_bytes(other)
    if least > memory_bytes:
        return RowFit(0, least, memory_bytes)
    row_bytes = (more - least) / (other - multiple)
    if row_bytes <= 0:
        return RowFit(None, least, memory_bytes)
    fits = multiple + math.floor((memory_bytes - least) / row_bytes)
    return RowFit(fits // multiple * multiple, least, memory_bytes)


def device_memory_bytes(coordination: Coordination) -> int | None:
    """Return the memory that a device of this process may use, or None if it is not known.

    For CPUs it is the control group's limit in equal parts for the processes and devices of the host, less
    the memory that the process uses already. All ranks call it.
    """
    device = jax.local_devices()[0]
    islands = coordination.islands
    hosts = [""] if islands is None else coordination.all_gather("hosts of memory", islands.environment.host)
    if (known := (device.memory_stats() or {}).get("bytes_limit")) is not None:
        return known
    limit = limits()["memory_bytes"]
    if limit is None or device.platform != "cpu":
        return None
    of_process = limit // hosts.count("" if islands is None else islands.environment.host)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(of_process - used, 0) // jax.local_device_count()


def fit_to_memory(prepared: "PreparedRun", loader: Loader, batch: Any, note: Callable[[str], None]) -> Loader:
    """Limit the rows of islands to what fits their memory, and return the loader of the remaining rows.

    All ranks call it.

    Args:
      prepared: the run of several islands, whose rows are limited.
      loader: the loader of this island's rows.
      batch: the first batch of this island.
      note: receives a line if an island has a limit.

    Raises:
      ValueError: lists every island that cannot hold the fewest rows; or see `RowShares.limit`.
    """
    shares, coordination, step = prepared.shares, prepared.coordination, prepared.island_step
    assert step is not None

    def program_bytes(rows: int) -> int:
        def of_rows(x: jax.Array) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0], rows // x.shape[0], *x.shape[2:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

        lowered = step.compute.lowered(prepared.wanted, jax.tree.map(of_rows, batch))
        memory: Any = lowered[0].compile().memory_analysis()
        arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return arguments + memory.temp_size_in_bytes

    memory_bytes, own = device_memory_bytes(coordination), RowFit(None)
    if memory_bytes is not None:
        leaf = jax.tree.leaves(batch)[0]
        own = fit_rows(program_bytes, leaf.shape[0] * leaf.shape[1], shares.multiple, memory_bytes)
    found = [RowFit(*each) for each in coordination.all_gather_islands("rows that fit", own)]
    problems = [
        f"island {island} has {bytes_text(each.memory_bytes)} a device, and the fewest rows need"
        f" {bytes_text(each.least_bytes)}; use more devices or --zero 3 there, --remat full, a smaller"
        " model, or leave it out"
        for island, each in enumerate(found)
        if each.rows == 0
    ]
    refuse("the model does not fit every island", problems)
    num_rows = loader.batches.num_rows(None)
    fit = [num_rows if each.rows is None else min(each.rows, num_rows) for each in found]
    if min(fit) == num_rows:
        return loader
    # limits are in examples, or in tokens
    shares.limit([-(-rows * loader.batches.batch // num_rows) for rows in fit])
    note(f"most rows that fit the memory of each island, of {num_rows}: {', '.join(map(str, fit))}")
    return loader.replace_shards(shares.shards())
