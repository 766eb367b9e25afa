"""Load batches of a source, in an order that depends only on the seed and the number of samples.

`order.py` has the order. Any batch can be loaded on its own, so a run resumes at a saved position at no cost.
Next: `placement.py` (onto the mesh).
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from shardtrain.data.order import epoch_order
from shardtrain.data.row_split import fill_with_copies, full_weights, weigh
from shardtrain.data.samples import Batch, Source, load_rows
from shardtrain.data.workers import Workers
from shardtrain.errors.field_types import too_small, wrong_types
from shardtrain.errors.messages import refuse

if TYPE_CHECKING:
    from shardtrain.data.token_batches import TokenBatches


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How batches are loaded ahead of the step. It changes no batch and no position.

    Args:
      prefetch: number of batches that are loaded ahead, each in a thread of its own. Batches that load in
        less than half a millisecond are loaded when they are needed, as all are with 0.
      workers: number of processes that load batches, for data whose Python code holds the interpreter's
        lock. Each process keeps a copy of the data's objects in memory. 0 means threads of the run's own
        process.
      heldout_workers: number of processes that load held-out batches. They start at each evaluation, which
        takes a second or two. 0 means threads.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    prefetch: int = 2
    workers: int = 0
    heldout_workers: int = 0

    def __post_init__(self) -> None:
        problems = wrong_types(self) + too_small(self, prefetch=0, workers=0, heldout_workers=0)
        refuse("batches cannot be loaded in this way", problems)


class Position(TypedDict):
    """The position of a run in its data, as a dict for JSON; independent of the batch size in examples.

    epoch: the epoch of the next batch.
    index: number of samples of this epoch before the next batch.
    """

    epoch: int
    index: int


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a source, epoch after epoch; each sample once per epoch, none dropped.

    Batch k of an epoch has positions [k * batch, (k + 1) * batch) of the epoch's order. If the last one
    is short, it is padded with copies of its own rows whose weights are 0. For held-out
    data use `epochs=1, shuffle=False`.

    Args:
      source: samples, each a dict of arrays of the same shapes.
      batch: rows of a batch, B.
      seed: the seed of the order.
      epochs: number of epochs; None for no end.
      shuffle: False keeps the order of the source, as does a source whose attribute `ordered` is True.
      rows: the rows of each batch to load, such as `placement.process_rows` or an island's rows; None loads
        all. It does not change which sample is in which row.
      prefetch: see `Loading`.
      workers: see `Loading`.

    Raises:
      ValueError: lists every argument that is out of range.

    >>> source = [{"x": np.array(i)} for i in range(3)]
    >>> for batch, position in Batches(source=source, batch=2, epochs=1, shuffle=False).iterate():
    ...     print(batch["x"], batch["weights"], position)
    [0 1] [1. 1.] {'epoch': 0, 'index': 2}
    [2 2] [1. 0.] {'epoch': 1, 'index': 0}
    """

    source: Source
    batch: int
    seed: int = 0
    epochs: int | None = None
    shuffle: bool = True
    rows: Sequence[int] | np.ndarray | None = None
    prefetch: int = 2
    workers: int = 0

    def __post_init__(self) -> None:
        problems = too_small(self, batch=1, seed=0, epochs=1, prefetch=0, workers=0)
        if len(self.source) == 0:
            problems.append("source has no samples; give one with 1 or more")
        if self.workers and getattr(self.source, "is_stream", False):
            problems.append(
                f"workers is {self.workers}, and the samples are of a stream, which each worker would read as"
                " a whole; use --loading.workers 0, and read in parallel in the function that yields the"
                " samples"
            )
        if self.rows is not None:
            wrong = [int(row) for row in self.rows if not 0 <= row < self.batch]
            if wrong or len(self.rows) == 0:
                problems.append(f"rows has {wrong or 'nothing'}; use rows from 0 to {self.batch - 1}")
        refuse("these batches cannot be made", problems)

    @property
    def row_counts(self) -> list[int]:
        """The numbers of rows that batches have."""
        return [self.batch]

    def num_rows(self, position: Position | None) -> int:
        """Return the number of rows of the batch at a position, which is the same for all."""
        return self.batch

    def advance(self, position: Position, num_batches: int = 1) -> Position:
        """Return the position some batches later.

        >>> batches = Batches(source=[{}] * 10, batch=4)
        >>> batches.advance({"epoch": 0, "index": 4}, 2)
        {'epoch': 1, 'index': 0}
        """
        epoch, index = position["epoch"], position["index"]
        # first the rest of this epoch, then whole epochs, then batches of the last one
        left = self._num_batches(len(self.source) - index)
        if num_batches < left:
            return Position(epoch=epoch, index=index + num_batches * self.batch)
        epochs, batches = divmod(num_batches - left, self._num_batches(len(self.source)))
        return Position(epoch=epoch + 1 + epochs, index=batches * self.batch)

    def num_batches(self, position: Position | None = None) -> int:
        """Return the number of batches from a position to the end; `sys.maxsize` if there is no end."""
        if self.epochs is None:
            return sys.maxsize
        epoch, index = (position["epoch"], position["index"]) if position else (0, 0)
        later = self.epochs - epoch - 1
        if later < 0:
            return 0
        return self._num_batches(len(self.source) - index) + later * self._num_batches(len(self.source))

    def load(self, position: Position) -> Batch:
        """Load the batch at a position.

        Returns:
          The arrays of the samples, stacked: (B, ...), or (len(rows), ...); and "weights", float32 (B,): the
          weights of the samples, or 1; 0 in rows of padding.

        Raises:
          ValueError: the samples of a batch have different names or shapes, or cannot be arrays.
          UserCodeFailed: the source raised.
        """
        position = normalise_position(position, len(self.source))
        first = position["index"]
        # the last batch of an epoch may be short: its missing rows are copies with weight 0
        num_real = min(self.batch, len(self.source) - first)
        rows, real = self._full_rows if num_real == self.batch else self._select_rows(num_real)
        # a source with an order of its own, such as a mixture, is read in sequence
        shuffle = self.shuffle and not getattr(self.source, "ordered", False)
        order = epoch_order(len(self.source), self.seed, position["epoch"]) if shuffle else int
        indices = [order(first + row) for row in rows]
        batch = load_rows(self.source, indices, self.seed, position["epoch"])
        weights = batch.get("weights", full_weights(len(rows)))
        return batch | {"weights": weigh(weights, real)}

    def iterate(self, position: Position | None = None) -> Generator[tuple[Batch, Position]]:
        """Iterate over the batches from a position on, with prefetching.

        Args:
          position: the position of the first batch; None for the start of epoch 0.

        Returns:
          Yields (batch, the position after it). `iterate` resumes from that position, with any batch size.
          `close()`, the end and an error stop its threads and processes.

        Raises:
          ValueError: the position is outside the source.
        """
        return read_ahead(self, normalise_position(position or Position(epoch=0, index=0), len(self.source)))

    @cached_property
    def _full_rows(self) -> tuple[list[int], np.ndarray]:
        return self._select_rows(self.batch)

    def _select_rows(self, num_real: int) -> tuple[list[int], np.ndarray]:
        """Return the rows to load of a batch with `num_real` rows, and whether each is real, bool (rows,)."""
        rows = np.arange(self.batch) if self.rows is None else np.asarray(self.rows)
        rows, real = fill_with_copies(rows, num_real)
        return rows.tolist(), real

    def _num_batches(self, num_samples: int) -> int:
        return -(-num_samples // self.batch)


def normalise_position(position: Position, num_samples: int) -> Position:
    """Return a position with the end of an epoch as the beginning of the next.

    Raises:
      ValueError: the position is outside the source.
    """
    epoch, index = position["epoch"], position["index"]
    if epoch < 0 or not 0 <= index <= num_samples:
        raise ValueError(
            f"position {dict(position)} is not in a source of {num_samples} samples: index goes from"
            f" 0 to {num_samples}. Use the data that it was saved with, or begin at epoch 0."
        )
    return Position(epoch=epoch + 1, index=0) if index == num_samples else Position(epoch=epoch, index=index)


QUICK_SECONDS = 0.0005
"""Quicker batches are loaded in the calling thread, while the device computes earlier steps: another thread
would compete with the training loop for Python's lock, and waking it takes about as long as loading."""


def read_ahead(batches: "Batches | TokenBatches", start: Position) -> Generator[tuple[Batch, Position]]:
    """Yield (batch, the position after it), from a position on.

    Worker processes load batches ahead; without them threads do, if recent batches took more than
    `QUICK_SECONDS` on average. Quicker batches are loaded several at once: those after the first find code
    and data in the processor's caches.
    """
    load, ahead = batches.load, max(batches.prefetch, batches.workers)

    def load_timed(position: Position) -> tuple[Batch, float]:
        began_seconds = time.monotonic()
        return load(position), time.monotonic() - began_seconds

    with ExitStack() as stack:
        if batches.workers:
            # a copy, without what it has computed so far
            copied = replace(batches, workers=0)
            load = stack.enter_context(Workers(copied, batches.workers, batches.source)).load
        threads = ThreadPoolExecutor(max(ahead, 1), thread_name_prefix="shardtrain-loader")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        # (a batch and the seconds that loading it took, the position after it)
        loading: deque[tuple[Future[tuple[Batch, float]], Position]] = deque()
        upcoming, mean_seconds = _positions(batches, start), 2 * QUICK_SECONDS
        while True:
            if batches.workers or (ahead and mean_seconds > QUICK_SECONDS):
                for position, after in islice(upcoming, ahead + 1 - len(loading)):
                    loading.append((threads.submit(load_timed, position), after))
            elif not loading:
                loading += [(_load_now(load_timed, p), after) for p, after in islice(upcoming, ahead + 1)]
            if not loading:
                return
            future, after = loading.popleft()
            batch, seconds = future.result()
            mean_seconds += (seconds - mean_seconds) / 8
            yield batch, after


def _load_now(
    load: Callable[[Position], tuple[Batch, float]], position: Position
) -> Future[tuple[Batch, float]]:
    """Load a batch in this thread; `result()` of the future raises its error."""
    future: Future[tuple[Batch, float]] = Future()
    try:
        future.set_result(load(position))
    except Exception as error:
        future.set_exception(error)
    return future


def _positions(batches: "Batches | TokenBatches", position: Position) -> Iterator[tuple[Position, Position]]:
    """Yield (the position of a batch, the position after it), from a position on."""
    for _ in range(batches.num_batches(position)):
        after = batches.advance(position)
        yield position, after
        position = after
