"""One island's shard of the parameters: add the updates of all islands, and decide which may continue.

Wave-synchronous parallelism (HetPipe, Park et al. 2020): after each wave of steps an island pushes its
update, and continues from all updates so far, unless another island is too many waves behind. Values only: no
MPI, no jax, no thread. Next: `parameter_server.py`, which receives the messages.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

NO_BARRIER = -1
"""The wave of the next barrier if no island requested one."""


Kind = Literal["push", "pull", "barrier"]
"""The kinds of events."""


class Event(NamedTuple):
    """A change or a read of a shard; the order of events decides the parameters.

    Args:
      kind: "push" means that an update was added, "pull" that an island was answered, "barrier" that it was
        answered at a barrier.
      island: the island that pushed or was answered.
      step: the last step of its wave.
    """

    kind: Kind
    island: int
    step: int


class EventLog(Protocol):
    """A log of the events of a shard."""

    def begin(self, step: int) -> None:
        """Delete the events after a step: the run resumes from it."""
        ...

    def write(self, event: Event) -> None:
        """Append an event."""
        ...


class Push(NamedTuple):
    """The message of an island to each shard at the end of a wave; without `update` it repeats its request.

    Args:
      step: the last step of the wave.
      least: number of waves that every island must have pushed before the answer.
      requests_barrier: whether the island requests a barrier as soon as possible.
      totals: float64 (k,), summed for island 0.
      update: float32, the island's change of this shard; None if it was pushed before.
      at_barrier: whether there is a barrier after this wave.
    """

    step: int
    least: int
    requests_barrier: bool = False
    totals: np.ndarray = np.zeros(0)
    update: np.ndarray | None = None
    at_barrier: bool = False


class Answer(NamedTuple):
    """The answer to a push.

    Args:
      clocks: island -> the number of its waves in `values`.
      barrier: number of waves after which the next barrier is; `NO_BARRIER` if none was requested.
      totals: float64 (k,): for island 0 the sum of all totals since its last answer, else zeros.
      values: float32, the shard: the values at the start plus all updates so far.
    """

    clocks: tuple[int, ...]
    barrier: int
    totals: np.ndarray
    values: np.ndarray


class ParameterShard:
    """A shard of the parameters. Each island has at most one unanswered push.

    Args:
      num_islands: number of islands.
      log: receives every event, in order; None disables it.
      order: the events of an earlier run, which are replayed in this order until a barrier that the earlier
        run did not have.
      report: receives a line when the replay ends before its last event.
      waves_ahead: number of waves that an island may have started when it learns of a barrier.

    Attributes:
      clocks: island -> the number of waves that it has pushed.
    """

    def __init__(
        self,
        num_islands: int,
        log: EventLog | None = None,
        order: Sequence[Event] = (),
        report: Callable[[str], object] = lambda text: None,
        *,
        waves_ahead: int = 0,
    ) -> None:
        self._num_islands, self._log, self._report = num_islands, log, report
        self._waves_ahead = waves_ahead
        self._order = drop_repeated_pulls(order)
        self.clocks = [0] * num_islands

    def begin(self, step: int, values: np.ndarray, dtypes: Sequence[tuple[slice, Any]]) -> None:
        """Start from common parameters.

        Args:
          step: number of completed steps.
          values: float32 (n,), the parameters of this shard, which are copied.
          dtypes: parts of the shard whose parameters have fewer bits, and the dtypes of sums.
        """
        self._values, self._dtypes = values.copy(), dtypes
        self.clocks = [0] * self._num_islands
        self._answered = [0] * self._num_islands
        self._waiting: dict[int, Push] = {}
        self._totals: np.ndarray | float = 0.0
        self._barrier = NO_BARRIER
        self._order = [event for event in self._order if event.step > step]
        if self._log is not None:
            self._log.begin(step)

    def push(self, island: int, push: Push) -> list[tuple[int, Answer]]:
        """Add a push; return the answers that are now possible, as (island, answer)."""
        assert island not in self._waiting, island
        self._waiting[island] = push
        # a barrier that the earlier run did not have: the order ends at this message, on every shard
        if push.update is None and Event("pull", island, push.step) not in self._order:
            self._end_order(push.step)
        answers = []
        while (event := self._next_event()) is not None:
            if self._log is not None:
                at_barrier = event.kind == "pull" and self._waiting[event.island].at_barrier
                self._log.write(event._replace(kind="barrier") if at_barrier else event)
            if event.kind == "push":
                self._add(event.island)
            else:
                answers.append((event.island, self._answer(event.island)))
        return answers

    def _next_event(self) -> Event | None:
        """Return the next event, in the order of a replay."""
        possible = [
            Event("pull" if push.update is None else "push", island, push.step)
            for island, push in self._waiting.items()
            if push.update is not None or min(self.clocks) >= push.least
        ]
        if not self._order:
            return possible[0] if possible else None
        if self._order[0] in possible:
            return self._order.pop(0)
        if not possible or len(self._waiting) < self._num_islands:
            return None
        # all islands wait, so nothing else will come
        self._end_order(possible[0].step)
        return possible[0]

    def _end_order(self, step: int) -> None:
        """End the replay."""
        if self._order:
            self._report(
                f"WARNING: the replay ends at step {step}, with a barrier that was not in the earlier"
                " run; its parameters are not repeated from here on"
            )
        self._order = []

    def _add(self, island: int) -> None:
        push = self._waiting[island]
        self._values += push.update
        for part, dtype in self._dtypes:
            self._values[part] = self._values[part].astype(dtype)
        self._totals = self._totals + push.totals
        self.clocks[island] += 1
        if self.clocks[island] > self._barrier:
            self._barrier = NO_BARRIER
        if push.requests_barrier and self._barrier == NO_BARRIER:
            # no island is beyond the wave after its last answer, except for the waves that it has in flight
            self._barrier = max(self._answered) + 1 + self._waves_ahead
        self._waiting[island] = push._replace(update=None)

    def _answer(self, island: int) -> Answer:
        push = self._waiting.pop(island)
        self._answered[island] = self.clocks[island]
        totals = np.zeros_like(push.totals)
        if island == 0:
            totals, self._totals = totals + self._totals, 0.0
        return Answer(tuple(self.clocks), self._barrier, totals, self._values.copy())


def drop_repeated_pulls(events: Sequence[Event]) -> list[Event]:
    """Return the pushes and pulls, and of pulls that an island repeated at a barrier only the last.

    >>> found = [Event("push", 0, 4), Event("pull", 0, 4), Event("push", 1, 4), Event("barrier", 0, 4)]
    >>> drop_repeated_pulls(found)[1:]
    [Event(kind='push', island=1, step=4), Event(kind='pull', island=0, step=4)]
    """
    events = [event._replace(kind="pull") if event.kind == "barrier" else event for event in events]
    last = {event: number for number, event in enumerate(events)}
    return [event for number, event in enumerate(events) if last[event] == number]
