"""Samples of a source: loaded, checked, and stacked as the rows of a batch. Next: `batches.py`."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from shardtrain.errors.messages import problems_error
from shardtrain.errors.user_code import user_code

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """Samples by index, read by several threads at once.

    A source may have a method `augmented(index, epoch, random)` beside: what training reads in place of
    `source[index]`. `random`, a numpy generator, is seeded by the run's seed, the epoch and the index, so its
    draws are the same on any layout, any number of processes and threads, and after a restart.

    Otherwise it may have a method `stacked_samples(indices)`, which is read in place of `source[index]` for
    each row of a batch. It returns their arrays stacked, name -> (len(indices), ...), in memory of their own.
    A subclass that defines `source[index]` alone is read by that.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, np.ndarray]: ...


def load_sample(source: Source, index: int, seed: int = 0, epoch: int = 0) -> Mapping[str, np.ndarray]:
    """Return a sample of a source, changed at random where the source does that.

    Args:
      source: the samples.
      index: of the sample.
      seed: of the run.
      epoch: number of times that the source was read before.

    Raises:
      UserCodeFailed: the source raised.
    """
    with user_code(lambda error: f"sample {index} of {type(source).__name__}"):
        augmented = getattr(source, "augmented", None)
        if augmented is None:
            return source[index]
        return augmented(index, epoch, np.random.default_rng((seed, epoch, index)))


def load_rows(source: Source, indices: Sequence[int], seed: int = 0, epoch: int = 0) -> Batch:
    """Load samples of a source as the rows of one batch; see `load_sample` and `Source`.

    Args:
      source: the samples.
      indices: the index of each row's sample.
      seed, epoch: as for `load_sample`.

    Raises:
      ValueError, UserCodeFailed: see `Batches.load`.
    """
    if hasattr(source, "augmented") or not _stacks_samples(type(source)):
        # a sample that fills several rows is loaded once
        return stack({index: load_sample(source, index, seed, epoch) for index in indices}, indices)

    def text() -> str:
        shown = f"{list(indices[:MAX_PROBLEMS])}"[:-1] + (", ...]" if len(indices) > MAX_PROBLEMS else "]")
        return f"stacked_samples({shown}) of {type(source).__name__}"

    with user_code(lambda error: text()):
        batch = cast("Any", source).stacked_samples(indices)
    if problems := find_stacking_problems(batch, len(indices)):
        raise problems_error(f"{text()} returned what is no batch", problems[:MAX_PROBLEMS])
    return batch


def _stacks_samples(source_type: type) -> bool:
    """Return whether a type stacks samples itself, and no subclass replaced how it reads one of them."""
    for each in source_type.__mro__:
        if "stacked_samples" in vars(each) or "__getitem__" in vars(each):
            return "stacked_samples" in vars(each)
    return False


def find_stacking_problems(batch: object, num_rows: int) -> list[str]:
    """Return the problems that keep what a source stacked from being the rows of a batch, one line each.

    >>> find_stacking_problems({"x": np.zeros((3, 2)), "label": [1, 2]}, 2)
    ["'x' has shape (3, 2); give an array of 2 rows, one for each index", "'label' is a list; use np.stack"]
    """
    if not isinstance(batch, dict):
        return [f"it is a {type(batch).__name__}; give a dict that names each array"]
    problems = []
    for name, value in batch.items():
        if not isinstance(value, np.ndarray):
            problems.append(f"{name!r} is a {type(value).__name__}; use np.stack")
        elif why := _array_problem(value):
            problems.append(f"{name!r} is {why}")
        elif value.shape[:1] != (num_rows,):
            rows = f"an array of {num_rows} rows, one for each index"
            problems.append(f"{name!r} has shape {value.shape}; give {rows}")
    return problems


def check_samples(samples: Mapping[int, Mapping[str, np.ndarray]]) -> None:
    """Check that samples are dicts of numbers.

    Args:
      samples: index -> sample.

    Raises:
      ValueError: lists what is not.
    """
    if problems := [text for index, sample in samples.items() for text in sample_problems(sample, index)]:
        raise problems_error("the data has samples that cannot be batched", problems[:MAX_PROBLEMS])


def stack(samples: Mapping[int, Mapping[str, np.ndarray]], indices: Sequence[int]) -> Batch:
    """Stack samples as the rows of one batch.

    Args:
      samples: index -> sample.
      indices: the index of each row's sample.

    Raises:
      ValueError: a sample is not a dict of numbers, or samples differ in their names or shapes.
    """
    check_samples(samples)
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
