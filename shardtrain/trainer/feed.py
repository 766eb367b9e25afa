"""Iterate over the batches of a run; the rows of this process and the batch size can change on the way.

The option batch_growth says when the batch becomes larger. Next: `loop.py`, which reads them.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from shardtrain.data import Batch, BatchShard, Loader, Position
from shardtrain.errors.messages import refuse


class Feed:
    """An iterator over (batch on the mesh, data position after it); usable inside `reading`.

    Args:
      loader: the loader of this process's rows.
      later: number of steps done -> the loader of a larger batch from then on; rows then do not change.

    Attributes:
      loader: the current loader.
      num_rows: rows of the newest whole batch.
      first_row: the number of this island's first row in it.
    """

    def __init__(self, loader: Loader, later: Mapping[int, Loader] | None = None) -> None:
        self.loader = loader
        self._loader_after = {0: loader, **later} if later else {}
        self._step = 0
        self.num_rows, self.first_row = 0, 0
        self._row_counts: set[int] = set()
        self._position = Position(epoch=0, index=0)
        self._has_changed = False
        # number of batches read; (number of batches before, loader, position) for each loader in use
        self._num_read, self._loaders = 0, [(0, loader, self._position)]
        self._loaded: Generator[Any, None, None] | None = None

    @contextmanager
    def reading(self, position: Position, step: int = 0) -> Iterator[None]:
        """Load batches ahead until the end of the block.

        Args:
          position: the position of the first batch.
          step: number of steps done.
        """
        self._step = step
        if self._loader_after:
            self.loader = self._loader_after[max(first for first in self._loader_after if first <= step)]
        self._num_read, self._loaders = 0, [(0, self.loader, position)]
        self._begin(position)
        try:
            yield
        finally:
            self._end()

    def __iter__(self) -> Iterator[tuple[Any, Position]]:
        return self

    def __next__(self) -> tuple[Any, Position]:
        if self._loader_after.get(self._step, self.loader) is not self.loader:
            self._use(self._loader_after[self._step])
        assert self._loaded is not None
        placed, after = next(self._loaded)
        self.num_rows = self.loader.batches.num_rows(self._position)
        self.first_row = self.loader.shards[self.num_rows].start
        if self.num_rows not in self._row_counts:
            self._row_counts.add(self.num_rows)
            self._has_changed = True
        self._position = after
        self._num_read, self._step = self._num_read + 1, self._step + 1
        return placed, after

    def change(self, shards: Mapping[int, BatchShard]) -> None:
        """Read other rows of the batches that follow."""
        self._use(self.loader.replace_shards(shards))

    def _use(self, loader: Loader) -> None:
        is_reading = self._loaded is not None
        self._row_counts.clear()
        self._end()
        self.loader = loader
        self._loaders.append((self._num_read, loader, self._position))
        if is_reading:
            self._begin(self._position)

    def load(self, number: int) -> Batch:
        """Load a batch again by its number since reading began, from 0."""
        first, loader, position = next(each for each in reversed(self._loaders) if each[0] <= number)
        return loader.batches.load(loader.batches.advance(position, number - first))

    def take_change(self) -> bool:
        """Return whether the newest batches had a new number of rows, so that a step may be compiled."""
        found, self._has_changed = self._has_changed, False
        return found

    def _begin(self, position: Position) -> None:
        self._position, self._loaded = position, self.loader.iterate(position)

    def _end(self) -> None:
        if self._loaded is not None:
            with closing(self._loaded):
                self._loaded = None


FORM = (
    "give STEPS:BATCHES for each change, such as 500:2,1000:4, or EPOCHS epochs:BATCHES, such as 2 epochs:2"
)


class BatchChange(NamedTuple):
    """A change of the batch size.

    Args:
      after: number of steps or epochs after which the batch changes.
      in_epochs: whether `after` counts epochs.
      batches: number of original batches that each step takes from then on.
    """

    after: int
    in_epochs: bool
    batches: int

    @property
    def time(self) -> str:
        """The time of the change, in words.

        >>> BatchChange(1, True, 2).time, BatchChange(500, False, 2).time
        ('epoch 1', 'step 500')
        """
        return f"{'epoch' if self.in_epochs else 'step'} {self.after}"


def parse_growth(text: str) -> tuple[BatchChange, ...]:
    """Parse the changes in order.

    Raises:
      ValueError: lists every pair that cannot be read or is out of order.

    >>> [change.time for change in parse_growth("500:2, 1000:4")]
    ['step 500', 'step 1000']
    >>> parse_growth("2 epochs:2")
    (BatchChange(after=2, in_epochs=True, batches=2),)
    >>> parse_growth("1 epoch:2")[0].time
    'epoch 1'
    """
    found: list[BatchChange] = []
    problems = []
    for pair in filter(None, map(str.strip, text.split(","))):
        when, _, batches = (part.strip() for part in pair.partition(":"))
        in_epochs = when.endswith(("epoch", "epochs"))
        number = when.removesuffix("s").removesuffix("epoch").strip() if in_epochs else when
        if not (number.isdecimal() and batches.isdecimal() and int(number) > 0 and int(batches) > 0):
            problems.append(f"{pair!r} is not two numbers from 1; {FORM}")
        elif found and in_epochs != found[0].in_epochs:
            problems.append(f"{pair!r} comes after {found[-1].time}; give all changes in steps, or in epochs")
        elif found and int(number) <= max(change.after for change in found):
            problems.append(f"{pair!r} comes after {found[-1].time}; give the changes in their order")
        else:
            found.append(BatchChange(int(number), in_epochs, int(batches)))
    refuse(f"batch_growth {text!r} cannot be read", problems)
    return tuple(found)


ENDLESS = 1 << 40
"""The number of samples of a stream or a mixture, which has no epochs."""


def growth_by_step(text: str, num_samples: int, batch: int) -> dict[int, int]:
    """Return number of steps done -> number of batches that each step takes from then on.

    Args:
      text: see `parse_growth`.
      num_samples: number of samples in an epoch.
      batch: samples in a step before all changes; the last step of an epoch has the rest.

    Raises:
      ValueError: changes are in epochs, and the samples have none.

    >>> growth_by_step("500:2,1000:4", 37, 8)
    {500: 2, 1000: 4}
    >>> growth_by_step("1 epochs:2,3 epochs:4", 37, 8)  # epochs of 5 steps, then of 3
    {5: 2, 11: 4}
    """
    found: dict[int, int] = {}
    step, epoch, batches = 0, 0, 1
    changes = parse_growth(text)
    if num_samples >= ENDLESS and any(change.in_epochs for change in changes):
        raise ValueError(
            f"batch_growth is {text!r}, and the samples are of a stream or a mixture, which has no epochs;"
            " give steps, such as --batch-growth 500:2,1000:4"
        )
    for change in changes:
        if change.in_epochs:
            step += (change.after - epoch) * -(-num_samples // (batch * batches))
            epoch, batches = change.after, change.batches
        else:
            step = change.after
        found[step] = change.batches
    return found


def growth_problems(run: Any) -> list[str]:
    """Return why a run cannot have a growing batch, one line each.

    Args:
      run: see `config.Run`.
    """
    text, strategy = run.batch_growth, run.strategy
    try:
        growth = parse_growth(text)
    except ValueError as error:
        return [str(error)]
    if not growth:
        return []
    from_table = strategy.pipeline.schedule.endswith(".csv") and strategy.layout.mesh.get("pipeline", 1) != 1
    refused = {
        "across 'pipeline': the schedule of its stages has one number of microbatches; use a mesh with the"
        " axis pipeline, or islands without stages": strategy.across.axis == "pipeline",
        "shares 'auto': a step's time then tells no speed; give weights, such as --shares 2,1": (
            strategy.across.shares == "auto"
        ),
        "batch_unit 'tokens': positions in the data count batches of one size; use examples": (
            run.batch_unit == "tokens"
        ),
        "a schedule from a .csv: its table has one number of microbatches; use a schedule by name, such as"
        " --schedule 1f1b": from_table,
        "scaling.steps: it divides the steps of the run by the replicas, but not those of batch_growth; give"
        " both for all replicas, without scaling.steps": run.scaling.steps,
        "clock_distance: islands that are ahead would change their batches earlier; use local steps": (
            strategy.synchronisation.distance is not None
        ),
    }
    return [
        f"batch_growth is {text!r}, which cannot be used with {why}, or leave batch_growth out"
        for why, is_used in refused.items()
        if is_used
    ]
