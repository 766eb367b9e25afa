"""Load the rows of the slots of an elastic run: parts of the rows of a batch, as equal as they can be."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from shardtrain.data.batches import Batches, Position
from shardtrain.data.loader import Loader, batch_shard
from shardtrain.data.row_split import RowSplit
from shardtrain.elastic.epoch import find_next
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import Metrics, State

KEPT_METRICS = 64

AHEAD = 4
"""Number of slots whose rows are loaded while others are computed."""


class SlotRows:
    """The rows of each slot, on the mesh of an island.

    Args:
      batches: the whole batches, from their first one on.
      num_slots: number of slots of a batch; at most its rows.
      placement: the placement on the island's mesh.
      microbatches: number of parts of a slot.
      every: number of steps between exchanges; with several, each step has one batch.
    """

    def __init__(
        self, batches: Batches, num_slots: int, placement: Placement, microbatches: int = 1, every: int = 1
    ) -> None:
        self._batches, self._every = batches, every
        self._loaders = _make_loaders(batches, num_slots, placement, microbatches)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="slots") if batches.prefetch else None
        self._ahead: dict[tuple[int, int], Future[Any]] = {}
        self._plan: Iterator[tuple[int, int]] = iter(())

    def load_first(self) -> Any:
        """Return the rows of the first slot of the first batch."""
        return self._loaders[0].place(self._load(0, 0))

    def find_position(self, batch: int) -> Position:
        """Return the position in the data of a batch, by its number."""
        return self._batches.advance(Position(epoch=0, index=0), batch)

    def iterate(
        self, step: int, slots: Sequence[int], batches: range | None = None
    ) -> Iterator[tuple[int, np.uint32, Iterator[Any]]]:
        """Yield (slot, number of its first row, its rows in each step until the next exchange).

        Args:
          step: the first step.
          slots: their numbers; in steps of several batches slots of the second one follow those of the first.
          batches: numbers of the batches of this step; None for the batch of each step's own number.
        """
        end, own = find_next(step, self._every), batches or range(step, step + 1)
        following = end if batches is None else batches.stop

        def find_keys(slot: int, first: int, num_steps: int) -> list[tuple[int, int]]:
            # with several steps until an exchange, each has one batch
            number, part = divmod(slot, len(self._loaders))
            return [(first + number + each, part) for each in range(num_steps)]

        plan = [key for slot in slots for key in find_keys(slot, own.start, end - step)]
        plan += [key for slot in slots[:AHEAD] for key in find_keys(slot, following, 1)]
        # others are of slots that another island computed after all, or of steps that were skipped
        self._ahead = {key: ahead for key, ahead in self._ahead.items() if key in plan}
        self._plan = iter(plan)
        self._load_ahead()
        for slot in slots:
            number, part = divmod(slot, len(self._loaders))
            loader = self._loaders[part]
            keys = find_keys(slot, own.start, end - step)
            first_row = np.uint32(loader.shard().start + number * self._batches.batch)
            yield slot, first_row, (loader.place(self._take(*key)) for key in keys)

    def _take(self, batch: int, slot: int) -> Any:
        ahead = self._ahead.pop((batch, slot), None)
        self._load_ahead()
        return self._load(batch, slot) if ahead is None else ahead.result()

    def _load_ahead(self) -> None:
        """Load the next rows of the plan while others are computed."""
        while self._background is not None and len(self._ahead) < AHEAD and (key := next(self._plan, None)):
            if key not in self._ahead:
                self._ahead[key] = self._background.submit(self._load, *key)

    def _load(self, batch: int, slot: int) -> Any:
        return self._loaders[slot].batches.load(self.find_position(batch))


class SlotProgram:
    """The state of a program that trains slots, and their rows.

    Args:
      rows: the rows of each slot.
      state: the state before the first step.
      shardings: of its arrays.

    Attributes:
      metrics: of the last exchange; {} before it.
      recent: number of steps done and metrics, of the newest exchanges.
    """

    def __init__(self, rows: SlotRows, state: State, shardings: Any) -> None:
        self._rows, self._shardings = rows, shardings
        self._state: State | None = state
        self.metrics: Metrics = {}
        self.recent: deque[tuple[int, Metrics]] = deque(maxlen=KEPT_METRICS)

    @property
    def state(self) -> State:
        """The state after the steps so far; numpy arrays may be set, and None frees it."""
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, state: State | None) -> None:
        self._state = None if state is None else jax.device_put(state, self._shardings)

    def find_position(self, batch: int) -> Position:
        """Return the position in the data of a batch, by its number."""
        return self._rows.find_position(batch)


def _make_loaders(batches: Batches, num_slots: int, placement: Placement, microbatches: int) -> list[Loader]:
    """Return the loader of each slot; all are padded to the same rows, so one program computes them."""
    mesh, axes = placement.mesh, placement.layout.batch_axes
    rows = [batches.batch // num_slots + (slot < batches.batch % num_slots) for slot in range(num_slots)]
    capacity = RowSplit.of(mesh.shape, axes, microbatches).pad_rows(rows[0])
    whole = Loader(batches, {}, mesh, axes, microbatches=microbatches)
    return [
        whole.replace_shards(
            {batches.batch: batch_shard(rows, slot, mesh, axes, microbatches, capacity=capacity)}
        )
        for slot in range(num_slots)
    ]
