"""Record the current activity of this process for the watchdog, and the seconds of each kind for the metrics.

A record is one assignment of a tuple, cheap enough for every wait of every step. Next: `diagnosis.py`.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from shardtrain.islands.watchdog.step_file import STEP_FILE, StepFile

Kind = Literal["input", "step", "islands", "stages", "save", "evaluation", "other"]
"""Kinds of activities: waiting for a batch, the step's own work, waiting for other islands or other stages,
saving, evaluating."""


class Activity(NamedTuple):
    """A running operation.

    Args:
      operation: its name in messages.
      since_seconds: time of its start, by `time.monotonic`.
      waits: whether it waits for other ranks or a device, which may be the cause if it takes long.
      long: whether it may take hours, such as compiling, saving or evaluating.
      waits_for: the ranks that are known to be missing.
      kind: the kind to which its seconds count.
    """

    operation: str
    since_seconds: float
    waits: bool = False
    long: bool = False
    waits_for: tuple[int, ...] = ()
    kind: Kind = "other"


class ActivityRecord:
    """The current activities of the main thread and of the MPI thread of a process.

    Args:
      step_file: records every step for a launcher, which reads it after this process has ended; None
        disables it.
      clock: a monotonic clock in seconds.

    >>> activity = ActivityRecord()
    >>> with activity.at("reading a batch"):
    ...     activity.now().operation
    'reading a batch'
    >>> activity.now().operation
    'setting up'
    """

    def __init__(
        self, step_file: StepFile | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.step_file, self._clock = step_file, clock
        self._seconds: dict[Kind, float] = {}
        self._charged_seconds = clock()
        self.step = 0
        self.num_collectives = 0
        self.last_collective = "nothing yet"
        self.failed_at: str | None = None
        self.main = Activity("setting up", time.monotonic(), long=True)
        self.bridge: Activity | None = None

    def begin_step(self, step: int) -> None:
        """Record that a step, counted from 1, begins."""
        self.step, self.failed_at = step, None
        if self.step_file is not None:
            self.step_file.write_step(step)

    @contextmanager
    def at(
        self,
        operation: str,
        *,
        waits: bool = False,
        long: bool = False,
        waits_for: tuple[int, ...] = (),
        kind: Kind | None = None,
    ) -> Iterator[None]:
        """Record an operation of the main thread within this context, see `Activity`.

        By default it has the kind of the enclosing operation.
        """
        before = self.main
        self._charge(before.kind)
        self.main = Activity(operation, time.monotonic(), waits, long, waits_for, kind or before.kind)
        try:
            yield
        except BaseException:
            # keep the innermost operation, for the error message
            self.failed_at = self.failed_at or operation
            raise
        finally:
            self._charge(self.main.kind)
            # the enclosing operation has made progress: restart its time
            self.main = before._replace(since_seconds=time.monotonic())

    def _charge(self, kind: Kind) -> None:
        """Add the seconds since the last call to those of a kind."""
        now_seconds = self._clock()
        self._seconds[kind] = self._seconds.get(kind, 0.0) + now_seconds - self._charged_seconds
        self._charged_seconds = now_seconds

    def take_seconds(self) -> dict[Kind, float]:
        """Return the seconds that the main thread spent on each kind since the last call.

        The seconds of an inner operation do not count for the enclosing one.

        >>> now = [0.0]
        >>> activity = ActivityRecord(clock=lambda: now[0])
        >>> with activity.at("the step", kind="step"):
        ...     now[0] += 2.0
        ...     with activity.at("gradients of rank 1", kind="islands"):
        ...         now[0] += 5.0
        >>> activity.take_seconds()
        {'other': 0.0, 'step': 2.0, 'islands': 5.0}
        """
        self._charge(self.main.kind)
        found, self._seconds = self._seconds, {}
        return found

    @contextmanager
    def record_on_bridge(self, operation: str) -> Iterator[None]:
        """Record an operation of the MPI thread within this context."""
        self.bridge = Activity(operation, time.monotonic(), waits=True)
        try:
            yield
        finally:
            self.last_collective = operation
            self.bridge = None

    def awaits(self, ranks: tuple[int, ...]) -> None:
        """Record the ranks for which the main thread waits."""
        if ranks != self.main.waits_for:
            self.main = self.main._replace(waits_for=ranks)

    def now(self) -> Activity:
        """Return the current activity: the MPI thread's if the main thread waits for it."""
        main, bridge = self.main, self.bridge
        return bridge if bridge is not None and main.waits else main


def activity_record(environ: Mapping[str, str] = os.environ) -> ActivityRecord:
    """Make the activity record of this process, with a step file if its launcher asked for one."""
    path = environ.get(STEP_FILE)
    try:
        return ActivityRecord(StepFile(Path(path)) if path else None)
    except OSError:
        return ActivityRecord()
