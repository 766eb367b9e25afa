"""Record signals that ask a run to stop, or end the process immediately if nothing can be saved yet.

A command enters `StopSignals` before it imports anything large. Python's own KeyboardInterrupt is not
reliable: it is raised anywhere in the main thread, and jax's garbage-collection callback swallows it. No jax.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals of Ctrl-C; of kill and most batch systems; of a closed terminal; of Slurm before the time limit."""

TIME_OVER = 1000
"""Number in place of a signal's: the time limit is near."""

UNWIND_SECONDS = 3.0

REPEAT_SECONDS = 0.5
"""Seconds after a SIGINT in which another one is a repetition: uv forwards, 0.2 s later, the SIGINT that the
whole process group has received."""


class Repeats:
    """Recognises a repeated SIGINT, as under `uv run` if a program interrupts the process group."""

    def __init__(self) -> None:
        self._first = -math.inf

    def __call__(self, number: int) -> bool:
        """Return whether a signal that arrives now is a repeated SIGINT."""
        if number != signal.SIGINT:
            return False
        now = time.monotonic()
        if now - self._first < REPEAT_SECONDS:
            return True
        self._first = now
        return False


class StopSignals:
    """Records the first signal that asks to stop, within its context.

    Until `can_save` is set, a signal ends the process immediately, like every second Ctrl-C. A thread ends
    it, because the main thread may be compiling or waiting in MPI, where Python runs no signal handler. A
    SIGHUP that was ignored before (nohup) stays ignored.

    Args:
      end: ends the process; called in any thread. None, for a user's own program, records signals from the
        start, and a second Ctrl-C raises KeyboardInterrupt.
      until_seconds: value of `time.monotonic` at which the run stops; None disables it.
      listens: whether to start that thread; a command that forks later must not.
      unwinds: whether to raise KeyboardInterrupt first, so that cleanup code runs; the thread waits for it.
    """

    def __init__(
        self,
        end: Callable[[signal.Signals], object] | None = None,
        until_seconds: float | None = None,
        *,
        listens: bool = True,
        unwinds: bool = False,
    ) -> None:
        self.received: signal.Signals | None = None
        self.time_over = False
        self.can_save = end is None
        self.compute_deadline = until_seconds
        self.before_end: Callable[[], object] = lambda: None
        self._end, self._listens, self._unwinds = end, listens and end is not None, unwinds
        self._before: dict[signal.Signals, Any] = {}
        self._pipe, self._ending, self._repeats = -1, threading.Lock(), Repeats()
        # in a forked data worker, SIGTERM must end the worker only
        os.register_at_fork(after_in_child=self._restore)

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread alone
        if threading.current_thread() is threading.main_thread():
            for number in select_handled(STOPPING):
                self._before[number] = signal.signal(number, self._ask)
            if self._listens:
                read, self._pipe = os.pipe()
                os.set_blocking(self._pipe, False)
                signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
                threading.Thread(target=self._listen, args=(read,), name="stop signals", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def asked(self) -> int:
        """Return the number of the signal that asked to stop, `TIME_OVER`, or 0."""
        over = self.compute_deadline is not None and time.monotonic() > self.compute_deadline
        return self.received or (TIME_OVER if over else 0)

    def record_agreement(self, asked: int) -> None:
        """Record the reason for which all islands have voted to stop."""
        self.time_over = asked == TIME_OVER
        self.received = None if self.time_over else signal.Signals(asked)

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        if self._pipe >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = -1

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        if self._repeats(number):
            return
        again = self.received is not None and number == signal.SIGINT
        if (again and self._end is None) or self._unwinds:
            self.received = signal.Signals(number)
            raise KeyboardInterrupt
        if again or not self.can_save:
            self._end_once(number)
        self.received = signal.Signals(number)
        # written at once and raw: a handler may interrupt the printing of another line
        write_raw(f"{self.received.name}: stopping after this step; Ctrl-C interrupts without saving\n")

    def _listen(self, pipe: int) -> None:
        """End the process from a thread, as the main thread may not reach `_ask`."""
        asked, repeats = False, Repeats()
        while data := os.read(pipe, 1):
            if data[0] not in STOPPING or repeats(data[0]):
                continue
            if not self.can_save or (asked and data[0] == signal.SIGINT):
                time.sleep(UNWIND_SECONDS if self._unwinds else 0)
                self._end_once(data[0])
            asked = True
        os.close(pipe)

    def _end_once(self, number: int) -> None:
        """End the process; only the first thread that calls this does so."""
        if self._ending.acquire(blocking=False):
            assert self._end is not None
            self.before_end()
            self._end(signal.Signals(number))


def keep_handlers(numbers: Sequence[signal.Signals]) -> None:
    """Install the handlers of Python again, in place of those that a library has installed in C meanwhile."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            # None means that the handler was not Python's
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def select_handled(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals to handle: all but a SIGHUP that nohup ignores."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def write_raw(text: str) -> None:
    """Write to standard error without its buffer and lock, ignoring errors."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
