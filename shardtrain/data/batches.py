"""Batches of a source, in an order that depends only on the seed and the number of samples.

The only module that imports Grain, for its global shuffle and its prefetch threads. Any batch can be
loaded on its own, so a run resumes at a saved position at no cost. Next: `placement.py` (onto the mesh).
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypedDict, cast

import grain
import numpy as np

from shardtrain.data.row_split import fill_with_copies, weigh
from shardtrain.errors.messages import problems_error
from shardtrain.errors.user_code import user_code

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """Samples by index, read by several threads at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, np.ndarray]: ...


class Position(TypedDict):
    """The position of a run in its data, as a dict for JSON; independent of the batch size.

    epoch: the epoch of the next batch.
    index: number of samples of this epoch before it.
    """

    epoch: int
    index: int


@lru_cache(maxsize=8)  # called once per batch, and Grain's objects take longer to create than to read
def epoch_order(num_samples: int, seed: int, epoch: int) -> Callable[[int], int]:
    """Return the order of an epoch: a random permutation that needs no memory.

    Args:
      num_samples: length of the source.
      seed: 0 or more.
      epoch: 0 or more.

    Returns:
      position in the epoch -> sample of the source.

    >>> order = epoch_order(5, seed=0, epoch=0)
    >>> sorted(order(position) for position in range(5))
    [0, 1, 2, 3, 4]
    """
    # Grain adds seed and epoch, which would make epoch 1 of seed 0 equal to epoch 0 of seed 1
    epoch_seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    # Grain 0.2.18 repeats one sample and loses another where the highest index is 4**8, 4**9, ...;
    # so the highest index is made odd, and an index that is not a sample is permuted again
    dataset = grain.MapDataset.range(num_samples + num_samples % 2).shuffle(seed=epoch_seed)
    shuffled = cast("Sequence[int]", dataset)

    def sample(position: int) -> int:
        assert 0 <= position < num_samples, (position, num_samples)
        index = shuffled[position]
        while index >= num_samples:
            index = shuffled[index]
        return index

    return sample


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
      shuffle: False keeps the order of the source.
      rows: which rows of each batch to load, such as `placement.process_rows` or an island's rows;
        None loads all. It does not change which sample is in which row.
      prefetch: number of batches to load ahead, each on a thread of its own; 0 uses no threads.

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

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}; use {least} or more"
            for name, least in (("batch", 1), ("seed", 0), ("epochs", 1), ("prefetch", 0))
            if (value := getattr(self, name)) is not None and value < least
        ]
        if len(self.source) == 0:
            problems.append("source has no samples; give one with 1 or more")
        if self.rows is not None:
            wrong = [int(row) for row in self.rows if not 0 <= row < self.batch]
            if wrong or len(self.rows) == 0:
                problems.append(f"rows has {wrong or 'nothing'}; use rows from 0 to {self.batch - 1}")
        if problems:
            raise problems_error("these batches cannot be made", problems)

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
          The arrays of the samples, stacked: (B, ...), or (len(rows), ...), and "weights", float32 (B,):
          those of the samples, or 1; 0 in rows of padding.

        Raises:
          ValueError: the samples of a batch have different names or shapes, or cannot be arrays.
          UserCodeFailed: the source raised.
        """
        position = self._normalise(position)
        first = position["index"]
        # the last batch of an epoch may be short: its missing rows are copies with weight 0
        num_real = min(self.batch, len(self.source) - first)
        rows = np.arange(self.batch) if self.rows is None else np.asarray(self.rows)
        order = epoch_order(len(self.source), self.seed, position["epoch"]) if self.shuffle else int
        rows, real = fill_with_copies(rows, num_real)
        indices = [order(first + int(row)) for row in rows]
        # a sample that fills several rows is loaded once
        batch = stacked({index: self._sample(index) for index in indices}, indices)
        weights = batch.get("weights", np.ones(len(rows), np.float32))
        return batch | {"weights": weigh(weights, real)}

    def _sample(self, index: int) -> Mapping[str, np.ndarray]:
        with user_code(lambda error: f"sample {index} of {type(self.source).__name__}"):
            return self.source[index]

    def iterate(self, position: Position | None = None) -> Generator[tuple[Batch, Position]]:
        """Iterate over the batches from a position on, with prefetching.

        Args:
          position: the position of the first batch; None for the start of epoch 0.

        Returns:
          Yields (batch, the position after it). `iterate` resumes from that position, with any batch size.
          `close()`, the end and an error stop its threads.

        Raises:
          ValueError: the position is outside the source.
        """
        start = self._normalise(position or Position(epoch=0, index=0))
        return self._iterate(start)

    def _iterate(self, start: Position) -> Generator[tuple[Batch, Position]]:
        options = grain.ReadOptions(num_threads=self.prefetch, prefetch_buffer_size=self.prefetch)
        dataset = grain.MapDataset.source(_BatchSource(self, start)).to_iter_dataset(options)
        # the threads of Grain load ahead, and end with the generator
        with closing(iter(dataset)) as loaded:
            for number, batch in enumerate(loaded, start=1):
                yield batch, self.advance(start, number)

    def _num_batches(self, num_samples: int) -> int:
        return -(-num_samples // self.batch)

    def _normalise(self, position: Position) -> Position:
        epoch, index = position["epoch"], position["index"]
        if epoch < 0 or not 0 <= index <= len(self.source):
            raise ValueError(
                f"position {dict(position)} is not in a source of {len(self.source)} samples: index goes from"
                f" 0 to {len(self.source)}. Use the data that it was saved with, or begin at epoch 0."
            )
        return Position(epoch=epoch + 1, index=0) if index == len(self.source) else position


def stacked(samples: Mapping[int, Mapping[str, np.ndarray]], indices: Sequence[int]) -> Batch:
    """Stack samples as the rows of one batch.

    Args:
      samples: index -> sample.
      indices: the index of each row's sample.

    Raises:
      ValueError: a sample is not a dict of numbers, or samples differ in their names or shapes.
    """
    if problems := [text for index, sample in samples.items() for text in sample_problems(sample, index)]:
        raise problems_error("the data has samples that cannot be batched", problems[:MAX_PROBLEMS])
    shapes = {
        str({name: np.shape(value) for name, value in sorted(sample.items())}) for sample in samples.values()
    }
    if len(shapes) > 1:
        raise ValueError(
            f"samples of one batch differ: {' and '.join(sorted(shapes))}; give all the same shapes"
        )
    return {name: np.stack([samples[index][name] for index in indices]) for name in samples[indices[0]]}


MAX_PROBLEMS = 8
"""Number of problems that are listed for the samples of a batch."""

NUMBERS = "biufcV"
"""Kinds of dtypes that devices take; V is bfloat16 and similar dtypes that numpy does not know."""


def sample_problems(sample: object, index: int) -> list[str]:
    """Return the problems that keep a sample from being a row of a batch, one line each.

    >>> sample_problems({"text": "a story", "label": 3}, 7)
    ["sample 7: 'text' is text ('a story'), not numbers; make tokens of it, or leave it out"]
    """
    if not isinstance(sample, Mapping):
        return [
            f"sample {index} is a {type(sample).__name__}; give a dict that names each array, such as"
            " {'image': ..., 'label': ...}"
        ]
    return [
        f"sample {index}: {name!r} is {why}"
        for name, value in sample.items()
        if (why := _array_problem(value))
    ]


def _array_problem(value: object) -> str:
    """Return what a value is and what to do, if it is not an array of numbers; else an empty text."""
    if value is None:
        return "None; give a number for what is missing, such as 0 with a weight of 0, or leave it out"
    try:
        array = np.asarray(value)
    except ValueError:
        return "a ragged list, whose rows have different lengths; pad them, with weights of 0 where padded"
    if array.dtype.kind in NUMBERS and array.dtype.names is None:
        return ""
    brief = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
    if array.dtype.kind in "US":
        return f"text ({brief}), not numbers; make tokens of it, or leave it out"
    if array.dtype.kind in "mM":
        return f"{array.dtype}, not numbers; use .astype('int64'), or leave it out"
    return (
        f"{type(value).__name__} of dtype {array.dtype} ({brief}); give an array of numbers, or leave it out"
    )


class _BatchSource:
    """The batches after a position, by index, for Grain's threads."""

    def __init__(self, batches: Batches, start: Position) -> None:
        self._batches, self._start = batches, start

    def __len__(self) -> int:
        return self._batches.num_batches(self._start)

    def __getitem__(self, index: int) -> Batch:
        return self._batches.load(self._batches.advance(self._start, index))
