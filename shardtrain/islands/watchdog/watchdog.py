"""The watchdog thread of a rank: exchanges heartbeats with the others and ends a run that hangs.

`diagnosis.py` finds the rank to blame. The end is reported in one message; the Python stacks of every rank
that still can write go to one file; the exit code asks a scheduler to start the run again.
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
    Watch,
    activity_text,
    find_stalled,
    message,
    silence_text,
    stall_text,
)
from shardtrain.islands.watchdog.peer import Peer, cause_text, is_at_work
from shardtrain.system.atomic_write import open_own

if TYPE_CHECKING:
    from shardtrain.islands.watchdog.heartbeat import HeartbeatChannel  # importing it starts MPI

BEAT, LEAVE, DIAGNOSED, WRITTEN = 1, 2, 3, 4
"""Tags of messages: a heartbeat; the rank leaves in order; the rank diagnosed a hang, and all end; the rank
has written its stacks after such a diagnosis."""

BEAT_SECONDS = 1.0
STACKS = "stacks.txt"
"""File in the run folder with the stacks of every rank of a run that was ended."""

WRITE_SECONDS = 3.0
"""Time limit for writing the stacks: the file system may be what hangs."""

OTHERS_SECONDS = 10.0
"""Time that the other ranks have for their stacks before MPI ends them."""

LAST_SECONDS = 15.0
"""Seconds after a diagnosis at which this process exits, whatever MPI does."""


class Watchdog:
    """The watchdog of this rank, which with the others watches the whole run while it is entered.

    It does not warn: a hang that it finds ends all ranks with `exit_codes.TEMPORARY_FAILURE`.

    Args:
      watch: the limits.
      activity: the activity record of this process.
      stacks: the file for the stacks.
      peers: all ranks, in order.
      heartbeats: the channel to the others, None where this process is alone.
      write: receives the message.
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
        self._watch, self._activity, self._stacks, self._peers, self._heartbeats = (
            watch,
            activity,
            stacks,
            peers,
            heartbeats,
        )
        self._write = write or _write_stderr
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
        # give the messages a moment to leave; the others also manage without them
        deadline = time.monotonic() + 1
        for rank in self._partners:
            self._heartbeats.send(rank, LEAVE)
        while not self._heartbeats.is_all_sent() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._leave.wait(self._every_seconds):
            now = time.monotonic()
            # 1. was this process itself suspended? then no rank is silent, its own clock has jumped
            self._reset_after_suspension(now)
            # 2. send the own heartbeat and receive those of the others; if MPI fails, they will seem silent
            with contextlib.suppress(Exception):
                self._exchange_heartbeats(now)
            # 3. end the run if a rank is silent or stalls
            self._diagnose(now)

    def _reset_after_suspension(self, now: float) -> None:
        """Restart all clocks if this process was suspended, or a library kept Python's lock."""
        suspended = now - self._round_seconds - self._every_seconds
        self._round_seconds = now
        if suspended > 2 + self._watch.silence_seconds / 4:
            self._awake_seconds = now
            self._received_seconds = dict.fromkeys(self._received_seconds, now)
            self._last = {}
        if self._heartbeats is not None and self._watch.silence_seconds:
            # a thread that needs no Python: where Python itself is stuck, the stack goes to the rank's log
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
        # a silent rank is lost; the stall of a rank is diagnosed by rank 0, which hears from all, or by
        # anyone once it has left
        if silent := self._silent(now):
            self._lost = set(silent)
            causes = {rank: cause_text(self._peers[rank], self._peers[self._rank].host) for rank in silent}
            then = {**here, **{rank: self._last[rank][0] for rank in silent if rank in self._last}}
            self._end(silence_text(silent, causes, then, names, self._watch))
        elif (self._rank == 0 or 0 in self._left) and (culprits := find_stalled(here, self._watch)):
            self._end(stall_text(culprits, here, names, self._watch))

    def _current_heartbeats(self, now: float) -> dict[int, Heartbeat]:
        """Return the heartbeats of the ranks that this one knows and that have not left, as of now."""
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
        # if many miss rank 0, the first ends the run before the next would report the same
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
          text: why.
        """
        self._end(message([text]))
        # the watchdog's thread was first, and ends this process
        time.sleep(LAST_SECONDS)
        os._exit(TEMPORARY_FAILURE)

    def _end(self, text: str | None, sender: int | None = None) -> None:
        """Write the diagnosis and the stacks, and end all ranks.

        Args:
          text: the diagnosis; None where another rank has written it.
          sender: the rank that sent it.
        """
        # once only, and not while the run ends in order
        if self._leave.is_set() or not self._ending.acquire(blocking=False):
            return
        # whatever hangs below, this process ends: first by a thread, then by one that needs no Python
        threading.Thread(target=_exit_after, args=(LAST_SECONDS,), daemon=True).start()
        # a C thread, for the case that Python itself is stuck
        faulthandler.dump_traceback_later(2 * LAST_SECONDS, exit=True, file=2)
        if self._activity.step_file is not None:
            self._activity.step_file.write_hung()
        if text is not None:
            self._write(f"\n{text}(stacks of the ranks that could write them: {self._stacks})\n")
        # all ranks write their stacks before MPI ends them: they show where each one is
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
        """Wait until the other ranks have written their stacks; who sent a diagnosis ends its receivers."""
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


def _write_stderr(text: str) -> None:
    # not through sys.stderr: another thread may hold the lock of sys.stderr, and hang
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
