"""Train on a stream of samples, such as a generator, of unknown length.

A stream is also a source by index, so positions, rows of islands and microbatches work as for other data. It
is read forward; the last samples are kept for threads that load batches. Next: `batches.py`.
"""

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.errors.field_types import too_small, wrong_types
from shardtrain.errors.messages import refuse

NO_END = 1 << 40
"""The length of a stream, larger than any run reaches."""

Sample = Mapping[str, np.ndarray]


class StreamSource:
    """The samples of a stream by index; a stream that ends is started again.

    Args:
      samples: see `Stream`.
      keep: number of samples that are kept after they were read.
    """

    ordered = True
    """Batches take these samples in sequence, without shuffling."""

    is_stream = True

    def __init__(self, samples: Callable[..., Iterable[Sample]], keep: int) -> None:
        self._samples, self._keep = samples, keep
        self._seeks = bool(inspect.signature(samples).parameters)
        self._lock = threading.Lock()
        self._kept: deque[Sample] = deque(maxlen=keep)
        self._length: int | None = None  # of one pass, once its end was met
        self._iterator: Iterator[Sample] = iter(())
        # number of the next sample (-1 before the first start), its place in the pass, whether the pass has
        # yielded a sample
        self._next, self._place, self._has_read = -1, 0, False

    def __len__(self) -> int:
        return NO_END

    def __getitem__(self, index: int) -> Sample:
        """Return a sample; for an earlier sample that is not kept, start the stream again.

        Raises:
          IndexError: no such sample.
          ValueError: the stream has no samples.
        """
        if not 0 <= index < NO_END:
            raise IndexError(f"sample {index} of {NO_END}")
        with self._lock:
            ahead = index - self._next
            if self._next < 0 or ahead < -len(self._kept) or (self._seeks and ahead > self._keep):
                # start at the sample if the stream can, else read and drop earlier samples
                self._kept.clear()
                self._begin(index % self._length if self._length else index)
                self._next = index
            while self._next <= index:
                self._kept.append(self._read_or_begin_again())
                self._next += 1
            return self._kept[index - self._next]

    def _read_or_begin_again(self) -> Sample:
        try:
            return self._read()
        except BaseException:
            self._next = -1  # a generator that raised looks as if it were at its end
            raise

    def _begin(self, place: int) -> None:
        """Begin a pass at a place, which may be after its end."""
        self._place, self._has_read = place, False
        if self._seeks:
            self._iterator = iter(self._samples(place))
            return
        self._iterator = iter(self._samples())
        skipped = sum(1 for _ in islice(self._iterator, place))
        self._length = skipped if skipped < place else self._length

    def _read(self) -> Sample:
        """Return the next sample; at the end of a pass, begin the next one."""
        for _ in range(2):
            for sample in self._iterator:
                self._place, self._has_read = self._place + 1, True
                return sample
            if self._length is None:
                # a pass that began after its end does not show where the end is
                again = self._samples(0) if self._seeks else self._samples()
                self._length = self._place if self._has_read else sum(1 for _ in again)
            if not self._length:
                raise ValueError("the stream has no samples; give one that yields some whenever it is begun")
            self._begin(self._place % self._length)
        raise ValueError(
            f"the stream had {self._length} samples, and fewer when it was begun again; give the same ones"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamSource, (self._samples, self._keep)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Train on the samples of a generator, in the order in which it yields them.

    Each start of the stream has to yield the same samples in the same order, as a resumed run starts it
    again: at the saved sample, if the function takes its number; otherwise at the first one, and earlier
      samples are
    read without training on them. Every process of a run reads the whole stream and takes its rows.

    Args:
      samples: a function that starts the stream: () -> iterable of samples, or (number of the first sample)
        -> iterable from that sample on.
      held_out: samples to evaluate on, by index. None disables evaluation.
      keep: number of samples that are kept after they were read, for threads that load batches; more than a
        few batches.

    Raises:
      ValueError: lists every value of a wrong type or out of range.

    >>> def squares(first: int):
    ...     while True:
    ...         yield {"x": np.float32(first**2)}
    ...         first += 1
    >>> source = Stream(samples=squares).train(Path())
    >>> [float(source[i]["x"]) for i in (3, 4, 1000)]
    [9.0, 16.0, 1000000.0]
    """

    samples: Callable[..., Any]
    held_out: Any = None
    keep: int = 4096

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if callable(self.samples) and len(inspect.signature(self.samples).parameters) > 1:
            problems.append("samples takes several arguments; let it take the number of a sample, or nothing")
        refuse("this stream cannot be used", problems + too_small(self, keep=1))

    def train(self, folder: Path) -> StreamSource:
        """Return the samples to train on; nothing is written into `folder`."""
        return StreamSource(self.samples, self.keep)

    def heldout(self, folder: Path) -> Any:
        """Return the samples to evaluate on, or None."""
        return self.held_out
