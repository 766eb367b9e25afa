"""Load batches of at most N tokens from samples of unequal lengths, in an order given by the seed.

Samples of similar length share a batch and are padded to one of few lengths, so few programs are compiled.
Any batch can be loaded on its own, as in `batches.py`; Grain buckets only by packing, and only in sequence.
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from shardtrain.data.batches import Position, normalise_position, read_ahead
from shardtrain.data.order import epoch_order
from shardtrain.data.row_split import fill_with_copies, weigh
from shardtrain.data.samples import Batch, Source, check_samples, load_sample, stack
from shardtrain.errors.field_types import too_small
from shardtrain.errors.messages import refuse

SHORTEST = 8
"""The shortest length that samples are padded to."""

CHUNK = 1 << 16
"""Number of positions of an epoch whose batches are formed together; its last batches are short."""


class SizedSource(Source, Protocol):
    """Samples by index, with their numbers of tokens."""

    @property
    def lengths(self) -> Sequence[int] | np.ndarray: ...


def length_ladder(longest: int) -> list[int]:
    """Return the lengths that samples are padded to: powers of 2, and the length of the longest sample.

    >>> length_ladder(100), length_ladder(5)
    ([8, 16, 32, 64, 100], [5])
    """
    found = [min(SHORTEST, longest)]
    while found[-1] < longest:
        found.append(min(2 * found[-1], longest))
    return found


class BatchPlan(NamedTuple):
    """The batches of a chunk of an epoch.

    Args:
      samples: the samples of the chunk, batch after batch.
      starts: number of samples before each batch, and the number of all samples.
      lengths: the padded length of each batch.
    """

    samples: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def plan_batches(samples: np.ndarray, lengths: np.ndarray, ladder: Sequence[int], batch: int) -> BatchPlan:
    """Form batches of samples; batches come in the order in which they are full.

    Args:
      samples: samples in the order of the epoch, int (n,).
      lengths: the number of tokens of each sample, int (n,).
      ladder: the lengths that samples are padded to.
      batch: largest number of tokens of a batch, with padding.

    >>> plan_batches(np.array([4, 7, 2]), np.array([8, 3, 5]), [4, 8], batch=8)
    BatchPlan(samples=array([4, 2, 7]), starts=array([0, 1, 2, 3]), lengths=array([8, 8, 4]))
    """
    rungs = np.searchsorted(ladder, lengths)
    found: list[tuple[int, int, np.ndarray]] = []
    for rung in np.unique(rungs):
        places, num_rows = np.flatnonzero(rungs == rung), batch // ladder[rung]
        for first in range(0, len(places), num_rows):
            part = places[first : first + num_rows]
            # those that are never full come last
            complete_at = part[-1] if len(part) == num_rows else len(samples) + rung
            found.append((int(complete_at), ladder[rung], part))
    found.sort(key=lambda each: each[0])
    return BatchPlan(
        samples=samples[np.concatenate([part for _, _, part in found])],
        starts=np.cumsum([0, *(len(part) for _, _, part in found)]),
        lengths=np.array([length for _, length, _ in found]),
    )


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """The batches of a source whose samples differ in length; each sample once per epoch, none dropped.

    A batch has at most `batch` tokens: N // L rows, padded to one of the lengths L of `length_ladder`. All
    arrays of a sample that have dims are padded with zeros at the end of the first dim, by the same number.
    Weights are per token, 0 where padded, unless a sample has a scalar weight of its own.

    Args:
      source: samples, with the number of tokens of each in `lengths`.
      batch: N, tokens of a batch with padding.
      seed: the seed of the order, which is the order of `Batches`.
      epochs: number of epochs; None for no end.
      shuffle: False keeps the order of the source.
      rows: number of rows of a batch -> the rows to load; None loads all. It does not change which sample is
        in which row.
      prefetch: see `batches.Loading`.
      workers: see `batches.Loading`.

    Raises:
      ValueError: lists every argument that is out of range.

    >>> class Words:
    ...     words = [b"a", b"tree", b"is", b"green", b"and", b"tall"]
    ...     lengths = [len(word) for word in words]
    ...     def __len__(self):
    ...         return len(self.words)
    ...     def __getitem__(self, index):
    ...         return {"tokens": np.frombuffer(self.words[index], np.uint8)}
    >>> batches = TokenBatches(source=Words(), batch=20, epochs=1, shuffle=False)
    >>> for batch, position in batches.iterate():
    ...     print(batch["tokens"].shape, batch["weights"].sum(1), position)
    (4, 5) [1. 4. 2. 5.] {'epoch': 0, 'index': 4}
    (4, 5) [3. 4. 0. 0.] {'epoch': 1, 'index': 0}
    """

    source: SizedSource
    batch: int
    seed: int = 0
    epochs: int | None = None
    shuffle: bool = True
    rows: Mapping[int, Sequence[int] | np.ndarray] | None = None
    prefetch: int = 2
    workers: int = 0

    def __post_init__(self) -> None:
        problems = too_small(self, batch=1, seed=0, epochs=1, prefetch=0, workers=0)
        lengths, num_samples = self._lengths, len(self.source)
        if num_samples == 0:
            problems.append("source has no samples; give one with 1 or more")
        if lengths.shape != (num_samples,):
            problems.append(
                f"source.lengths has shape {lengths.shape}, and there are {num_samples} samples; give the"
                " number of tokens of each"
            )
        elif num_samples and lengths.min() < 1:
            index = int(lengths.argmin())
            problems.append(f"sample {index} has length {lengths[index]}; leave out samples without tokens")
        elif num_samples and lengths.max() > self.batch >= 1:
            index = int(lengths.argmax())
            problems.append(
                f"batch is {self.batch} tokens, and sample {index} has {lengths[index]}; use"
                f" {lengths[index]} or more, or leave out longer samples"
            )
        refuse("these batches cannot be made", problems)

    @property
    def ladder(self) -> list[int]:
        """The lengths that samples are padded to."""
        return length_ladder(int(self._lengths.max()))

    @property
    def row_counts(self) -> list[int]:
        """The numbers of rows that batches have, rising."""
        return sorted({self.batch // length for length in self.ladder})

    @property
    def rows_by_length(self) -> list[Batch]:
        """One row for each padded length of batches: the shortest sample, padded to that length."""
        index = int(self._lengths.argmin())
        sample, shortest = load_sample(self.source, index, self.seed, 0), int(self._lengths[index])
        lengths = [length for length in self.ladder if length >= shortest]
        return [stack({index: pad_sample(sample, shortest, length)}, [index]) for length in lengths]

    def num_rows(self, position: Position | None) -> int:
        """Return the number of rows of the batch at a position."""
        plan, number, _ = self._find(position or Position(epoch=0, index=0))
        return self.batch // int(plan.lengths[number])

    def advance(self, position: Position, num_batches: int = 1) -> Position:
        """Return the position some batches later."""
        _, number, (epoch, chunk) = self._find(position)
        number += num_batches
        while number >= (counted := self._count(epoch, chunk)):
            number -= counted
            epoch, chunk = (epoch, chunk + 1) if chunk + 1 < self._num_chunks else (epoch + 1, 0)
        starts = self._plan(epoch, chunk).starts
        return Position(epoch=epoch, index=chunk * CHUNK + int(starts[number]))

    def num_batches(self, position: Position | None = None) -> int:
        """Return the number of batches from a position to the end; `sys.maxsize` if there is no end."""
        if self.epochs is None:
            return sys.maxsize
        position = position or Position(epoch=0, index=0)
        if position["epoch"] >= self.epochs:
            return 0
        _, number, (epoch, chunk) = self._find(position)
        left = sum(self._count(epoch, each) for each in range(chunk, self._num_chunks)) - number
        later = range(epoch + 1, self.epochs)
        return left + sum(self._count(each, i) for each in later for i in range(self._num_chunks))

    def load(self, position: Position) -> Batch:
        """Load the batch at a position.

        Returns:
          The arrays of the samples, padded and stacked: (N // L, ...), or only `rows`; and "weights",
            float32:
          the weights of the samples, or (N // L, L) with 1 for a token; 0 in padding.

        Raises:
          ValueError: the position is not the beginning of a batch; or samples cannot be batched.
          UserCodeFailed: the source raised.
        """
        plan, number, _ = self._find(position)
        length = int(plan.lengths[number])
        indices = plan.samples[plan.starts[number] : plan.starts[number + 1]].tolist()
        num_rows = self.batch // length
        rows = np.arange(num_rows) if self.rows is None else np.asarray(self.rows[num_rows])
        rows, real = fill_with_copies(rows, len(indices))
        indices = [indices[row] for row in rows]
        epoch = position["epoch"]
        samples = {index: load_sample(self.source, index, self.seed, epoch) for index in indices}
        check_samples(samples)
        padded = {i: pad_sample(sample, int(self._lengths[i]), length) for i, sample in samples.items()}
        batch = stack(padded, indices)
        return batch | {"weights": weigh(batch["weights"], real)}

    def iterate(self, position: Position | None = None) -> Generator[tuple[Batch, Position]]:
        """Iterate over the batches from a position on, with prefetching; see `Batches.iterate`.

        Raises:
          ValueError: the position is outside the source, or not the beginning of a batch.
        """
        start = normalise_position(position or Position(epoch=0, index=0), len(self.source))
        self._find(start)
        return read_ahead(self, start)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.asarray(self.source.lengths, dtype=np.int64)

    @property
    def _num_chunks(self) -> int:
        return -(-len(self.source) // CHUNK)

    @cached_property
    def _plan(self) -> Callable[[int, int], BatchPlan]:
        """(epoch, chunk) -> the batches of the chunk; the last few are cached."""
        ladder = self.ladder

        def plan(epoch: int, chunk: int) -> BatchPlan:
            places = range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.source)))
            order = epoch_order(len(self.source), self.seed, epoch) if self.shuffle else int
            samples = np.fromiter((order(place) for place in places), np.int64, len(places))
            return plan_batches(samples, self._lengths[samples], ladder, self.batch)

        return lru_cache(maxsize=4)(plan)

    @cached_property
    def _count(self) -> Callable[[int, int], int]:
        """(epoch, chunk) -> the number of batches of the chunk."""
        return lru_cache(maxsize=None)(lambda epoch, chunk: len(self._plan(epoch, chunk).lengths))

    def _find(self, position: Position) -> tuple[BatchPlan, int, tuple[int, int]]:
        """Return the plan with the batch at a position, the batch's number in it, and (epoch, chunk)."""
        position = normalise_position(position, len(self.source))
        epoch = position["epoch"]
        chunk, before = divmod(position["index"], CHUNK)
        plan = self._plan(epoch, chunk)
        number = int(np.searchsorted(plan.starts, before))
        if plan.starts[number] != before:
            raise ValueError(
                f"position {dict(position)} is not the beginning of a batch of {self.batch} tokens; use the"
                " number of tokens that it was saved with, or begin at epoch 0"
            )
        return plan, number, (epoch, chunk)


def pad_sample(sample: Mapping[str, np.ndarray], length: int, to: int) -> dict[str, np.ndarray]:
    """Pad the arrays of a sample with zeros, and add weights of its tokens.

    >>> padded = pad_sample({"tokens": np.array([5, 6, 7]), "label": np.array(1)}, 2, 4)
    >>> padded["tokens"].tolist(), padded["weights"].tolist(), padded["label"].tolist()
    ([5, 6, 7, 0, 0], [1.0, 1.0, 0.0, 0.0], 1)
    """
    arrays = {"weights": np.ones(length, np.float32)} | {k: np.asarray(x) for k, x in sample.items()}
    return {
        name: np.pad(x, [(0, to - length), *[(0, 0)] * (x.ndim - 1)]) if x.ndim else x
        for name, x in arrays.items()
    }
