"""Run the watchdog thread of a rank: exchange heartbeats with other ranks, and end a run that hangs.

`diagnosis.py` finds the rank to blame. One message reports the end, the Python stacks of all ranks that can
still write go to one file, and the exit code requests a restart from a scheduler.
"""

import contextlib
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.islands.watchdog.diagnosis import (
    Heartbeat,
    Peer,
    Watch,
    activity_text,
    cause_text,
    find_stalled,
    format_diagnosis,
    is_at_work,
    silence_text,
    stall_text,
)
from shardtrain.system.atomic_write import open_own
from shardtrain.system.stop_signals import write_raw

if TYPE_CHECKING:
    from shardtrain.islands.bridge import HeartbeatChannel  # importing it starts MPI

BEAT, LEAVE, DIAGNOSED, WRITTEN = 1, 2, 3, 4
"""Tags of messages: a heartbeat; the rank leaves in order; the rank diagnosed a hang, so that all end; the
rank has written its stacks after a diagnosis."""

BEAT_SECONDS = 1.0
STACKS = "stacks.txt"
"""File in the run folder with the stacks of all ranks of a hanging run."""

WRITE_SECONDS = 3.0
"""Time limit for writing the stacks: the file system itself may hang."""

OTHERS_SECONDS = 10.0
"""Seconds in which the other ranks may write their stacks before MPI ends them."""

LAST_SECONDS = 15.0
"""Seconds after a diagnosis until this process exits, whatever MPI does."""


class Watchdog:
    """The watchdog of this rank, which watches the whole run together with the others within its context.

    A hang ends all ranks with `exit_codes.TEMPORARY_FAILURE`, without a warning before.

    Args:
      watch: the limits.
      activity: the activity record of this process.
      stacks: the file for the stacks.
      peers: all ranks, in order.
      heartbeats: the channel to the others; None for a single process.
      write: receives the message; None writes to standard error.
    """

    def __init__(
        self,
        watch: Watch,
        activity: ActivityRecord,
        stacks: Path,
        peers: Sequence[Peer],
        heartbeats: "HeartbeatChannel | None" = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        self._watch, self._activity, self._stacks = watch, activity, stacks
        self._peers, self._heartbeats = peers, heartbeats
        # not through sys.stderr: another thread may hold its lock, and hang
        self._write = write or write_raw
        self._rank = 0 if heartbeats is None else heartbeats.rank
        self._partners = [] if heartbeats is None else heartbeats.partners
        self._every_seconds = min(BEAT_SECONDS, watch.silence_seconds / 5 or BEAT_SECONDS)
        self._leave, self._ending = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        now = self._round_seconds = self._awake_seconds = time.monotonic()
        self._received_seconds = dict.fromkeys(self._partners, now)
        self._last: dict[int, tuple[Heartbeat, float]] = {}
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Announce that this rank leaves in order: the others no longer expect its heartbeats."""
        self._leave.set()
        self._thread.join(timeout=LAST_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        if self._heartbeats is None or self._thread.is_alive():
            return
        # give the messages a moment; the others do not depend on them
        deadline = time.monotonic() + 1
        for rank in self._partners:
            self._heartbeats.send(rank, LEAVE)
        while not self._heartbeats.is_all_sent() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._leave.wait(self._every_seconds):
            now = time.monotonic()
            # 1. if this process was suspended, its clock has jumped, and no rank is silent
            self._reset_after_suspension(now)
            # 2. exchange heartbeats; if MPI fails, the others will seem silent
            with contextlib.suppress(Exception):
                self._exchange_heartbeats(now)
            # 3. end the run if a rank is silent or stalls
            self._diagnose(now)

    def _reset_after_suspension(self, now: float) -> None:
        """Restart all clocks if this process was suspended, or a library held Python's lock."""
        suspended = now - self._round_seconds - self._every_seconds
        self._round_seconds = now
        if suspended > 2 + self._watch.silence_seconds / 4:
            self._awake_seconds = now
            self._received_seconds = dict.fromkeys(self._received_seconds, now)
            self._last = {}
        if self._heartbeats is not None and self._watch.silence_seconds:
            # a thread that needs no Python: if Python itself is stuck, the stack goes to the rank's log
            faulthandler.dump_traceback_later(0.9 * self._watch.silence_seconds, file=2)

    def _own_heartbeat(self, now: float) -> Heartbeat:
        heartbeat = Heartbeat.of(self._activity, now)
        return heartbeat._replace(seconds=min(heartbeat.seconds, now - self._awake_seconds))

    def _exchange_heartbeats(self, now: float) -> None:
        if self._heartbeats is None:
            return
        for rank in self._partners:
            if rank not in self._left:
                self._heartbeats.send(rank, BEAT, self._own_heartbeat(now).encode())
        for rank, tag, data in self._heartbeats.received():
            self._received_seconds[rank] = now
            if tag == BEAT:
                self._last[rank] = Heartbeat.decode(data), now
            elif tag == LEAVE:
                self._left.add(rank)
            elif tag == DIAGNOSED:
                self._end(None, sender=rank)

    def _diagnose(self, now: float) -> None:
        here = self._current_heartbeats(now)
        names = [peer.name for peer in self._peers]
        # a silent rank is lost; rank 0, which has all heartbeats, diagnoses stalls, or any rank after it left
        if silent := self._silent(now):
            self._lost = set(silent)
            causes = {rank: cause_text(self._peers[rank], self._peers[self._rank].host) for rank in silent}
            then = {**here, **{rank: self._last[rank][0] for rank in silent if rank in self._last}}
            self._end(silence_text(silent, causes, then, names, self._watch))
        elif (self._rank == 0 or 0 in self._left) and (culprits := find_stalled(here, self._watch)):
            self._end(stall_text(culprits, here, names, self._watch))

    def _current_heartbeats(self, now: float) -> dict[int, Heartbeat]:
        """Return the heartbeats of the known ranks that have not left, with seconds counted up to now."""
        found = {
            rank: heartbeat._replace(seconds=heartbeat.seconds + now - came)
            for rank, (heartbeat, came) in self._last.items()
            if rank not in self._left
        }
        own = {self._rank: self._own_heartbeat(now)}
        return {**own, **found} if self._rank == 0 else own

    def _silent(self, now: float) -> dict[int, float]:
        if not self._watch.silence_seconds:
            return {}
        # if many ranks miss rank 0, the first one ends the run before others report the same
        later = 0.5 * min(max(self._rank - 1, 0), 8)
        return {
            rank: now - received
            for rank, received in self._received_seconds.items()
            if rank not in self._left
            and now - received > self._watch.silence_seconds + later
            and not is_at_work(self._peers[rank], self._peers[self._rank].host, now - received, self._watch)
        }

    def end(self, text: str) -> NoReturn:
        """End all ranks for a reason that the main thread has found.

        Args:
          text: the reason.
        """
        self._end(format_diagnosis([text]))
        # the watchdog's thread is already ending this process
        time.sleep(LAST_SECONDS)
        os._exit(TEMPORARY_FAILURE)

    def _end(self, text: str | None, sender: int | None = None) -> None:
        """Write the diagnosis and the stacks, and end all ranks.

        Args:
          text: the diagnosis; None if another rank has written it.
          sender: the rank that sent the diagnosis; None if this rank made it.
        """
        # once only, and not while the run ends in order
        if self._leave.is_set() or not self._ending.acquire(blocking=False):
            return
        # this process ends even if the code below hangs: by a thread, or by a C thread if Python is stuck
        threading.Thread(target=_exit_after, args=(LAST_SECONDS,), daemon=True).start()
        faulthandler.dump_traceback_later(2 * LAST_SECONDS, exit=True, file=2)
        if self._activity.step_file is not None:
            self._activity.step_file.write_hung()
        if text is not None:
            self._write(f"\n{text}(stacks of the ranks that could write them: {self._stacks})\n")
        # all ranks write their stacks before MPI ends them
        others = self._send_diagnosis() if sender is None else set()
        writing = threading.Thread(target=self._write_stacks, daemon=True)
        writing.start()
        writing.join(timeout=WRITE_SECONDS)
        if self._heartbeats is not None:
            with contextlib.suppress(Exception):
                self._wait_for_stacks(self._heartbeats, others, sender)
            self._heartbeats.end_all(TEMPORARY_FAILURE)
        os._exit(TEMPORARY_FAILURE)

    def _send_diagnosis(self) -> set[int]:
        """Announce the diagnosis to the other ranks that still answer; return these."""
        others = set(range(len(self._peers))) - {self._rank} - self._left - self._lost
        if self._heartbeats is not None:
            with contextlib.suppress(Exception):
                for rank in others:
                    self._heartbeats.send(rank, DIAGNOSED)
        return others

    def _wait_for_stacks(self, heartbeats: "HeartbeatChannel", others: set[int], sender: int | None) -> None:
        """Wait until the other ranks have written their stacks; the sender of a diagnosis ends the others."""
        if sender is not None:
            heartbeats.send(sender, WRITTEN)
            time.sleep(LAST_SECONDS)
        deadline = time.monotonic() + OTHERS_SECONDS
        while others and time.monotonic() < deadline:
            others -= {rank for rank, tag, _ in heartbeats.received() if tag == WRITTEN}
            heartbeats.is_all_sent()
            time.sleep(0.02)

    def _write_stacks(self) -> None:
        peer, heartbeat = self._peers[self._rank], self._own_heartbeat(time.monotonic())
        head = (
            f"=== {peer.name}, rank {self._rank}, process {peer.pid}, {datetime.now():%Y-%m-%d %H:%M:%S}:"
            f" {activity_text(heartbeat)};"
            f" last collective of all ranks: {self._activity.last_collective!r} ===\n"
        )
        with contextlib.suppress(OSError):
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            # in one write: the ranks share the file
            with open_own(self._stacks, append=True) as file:
                file.write(head.encode() + stacks_text() + b"\n")


def stacks_text() -> bytes:
    """Return the Python stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(TEMPORARY_FAILURE)
