"""One island's shard of the parameters that all islands push updates to: who may go on, and who must wait.

Wave-synchronous parallelism (HetPipe, Park et al. 2020): an island pushes what it changed once a wave of
steps, and goes on from all that was pushed so far, if no island is too many waves behind. Values only: no
MPI, no jax, no thread. Next: `parameter_server.py`, which brings messages here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

NO_BARRIER = -1
"""The wave of the next barrier if no island requested one."""


Kind = Literal["push", "pull", "barrier"]
"""Of events."""


class Event(NamedTuple):
    """Something that changes a shard, or is read from it; their order decides the parameters.

    Args:
      kind: "push": an update was added; "pull": an island was answered; "barrier": it was, at a barrier.
      island: whose.
      step: the step that ended its wave.
    """

    kind: Kind
    island: int
    step: int


class EventLog(Protocol):
    """Where the events of a shard are written."""

    def begin(self, step: int) -> None:
        """Delete the events after a step: the run resumes from it."""
        ...

    def write(self, event: Event) -> None:
        """Append an event."""
        ...


class Push(NamedTuple):
    """What an island sends to each shard at the end of a wave, or, without `update`, to ask again.

    Args:
      step: the step that ended the wave.
      least: it is answered once every island has pushed so many waves.
      requests_barrier: it wants a barrier as soon as possible.
      totals: float64 (k,), added up for island 0.
      update: float32, what the island changed of this shard; None: it was pushed before.
      at_barrier: there is a barrier after this wave.
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
      barrier: the number of waves after which the next barrier is; `NO_BARRIER`: none was requested.
      totals: float64 (k,): for island 0 the sum of what was pushed since its last answer, else zeros.
      values: float32, the shard: the values at the start plus all updates that were pushed.
    """

    clocks: tuple[int, ...]
    barrier: int
    totals: np.ndarray
    values: np.ndarray


class ParameterShard:
    """A shard of the parameters. Each island has at most one push that is not answered.

    Args:
      num_islands: number of islands.
      log: gets every event, in order; None: nothing is written.
      order: the events of an earlier run, which are repeated in this order; a barrier that it did not have
        ends that.
      report: receives a line when the order ends before its last event.
      waves_ahead: how many waves an island may have started when it hears of a barrier.

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
        self._order = last_pulls(order)
        self.clocks = [0] * num_islands

    def begin(self, step: int, values: np.ndarray, dtypes: Sequence[tuple[slice, Any]]) -> None:
        """Start from common parameters.

        Args:
          step: steps done.
          values: float32 (n,), the parameters of this shard; they are copied.
          dtypes: parts of the shard whose parameters have fewer bits, and their dtype: sums are rounded.
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
        """Take a push; return the answers that can be given now, as (island, answer)."""
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
        """Return what happens next, in the order of `order` where there is one."""
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
        """Go on in an order of its own."""
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
            # nobody is beyond the wave that follows its last answer, but for those that it has in flight
            self._barrier = max(self._answered) + 1 + self._waves_ahead
        self._waiting[island] = push._replace(update=None)

    def _answer(self, island: int) -> Answer:
        push = self._waiting.pop(island)
        self._answered[island] = self.clocks[island]
        totals = np.zeros_like(push.totals)
        if island == 0:
            totals, self._totals = totals + self._totals, 0.0
        return Answer(tuple(self.clocks), self._barrier, totals, self._values.copy())


def last_pulls(events: Sequence[Event]) -> list[Event]:
    """Return the pushes and pulls, without the pulls that an island repeated in the same step, at a barrier.

    >>> found = [Event("push", 0, 4), Event("pull", 0, 4), Event("push", 1, 4), Event("barrier", 0, 4)]
    >>> last_pulls(found)[1:]
    [Event(kind='push', island=1, step=4), Event(kind='pull', island=0, step=4)]
    """
    events = [event._replace(kind="pull") if event.kind == "barrier" else event for event in events]
    last = {event: number for number, event in enumerate(events)}
    return [event for number, event in enumerate(events) if last[event] == number]
