"""Diagnose from heartbeats and states of processes which rank stalls the run, and format the message.

No thread, no clock, no MPI. Next: `watchdog.py`, which collects heartbeats and acts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.islands.watchdog.activity import ActivityRecord

LEAST_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Time limits after which a run without progress is ended.

    Args:
      silence_seconds: seconds without heartbeats after which a rank counts as lost: it is stopped, or its
        host or the network is down; 0 disables this limit.
      stall_seconds: time limit of a step, a batch, or a message between islands; 0 disables it.
      long_seconds: time limit of operations that may take hours: compiling, restoring, saving, evaluating;
        0 disables it.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    silence_seconds: float = 20.0
    stall_seconds: float = 600.0
    long_seconds: float = 5 * 60 * 60.0

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        problems += [
            f"{name} is {value}; use 0 to disable it, or {LEAST_SECONDS:.0f} or more"
            for name, value in vars(self).items()
            if value != 0 and not LEAST_SECONDS <= value < math.inf
        ]
        if 0 < self.long_seconds < self.stall_seconds:
            problems.append(
                f"long_seconds is {self.long_seconds}, below stall_seconds, the limit of shorter operations,"
                f" which is {self.stall_seconds}; use {self.stall_seconds} or more for long_seconds"
            )
        refuse("these time limits are not possible", problems)

    def limit(self, long: bool) -> float:
        """Return the time limit of an operation in seconds."""
        return (self.long_seconds if long else self.stall_seconds) or math.inf

    @property
    def silent_work_seconds(self) -> float:
        """Seconds without heartbeats after which a rank counts as lost although its process runs; finite.

        >>> Watch().silent_work_seconds, Watch(stall_seconds=0, long_seconds=0).silent_work_seconds
        (600.0, 20.0)
        """
        return self.stall_seconds or self.long_seconds or self.silence_seconds


def allow_waits(watch: Watch, seconds: float) -> Watch:
    """Return the limits of a run whose steps may also wait for something else that long.

    >>> [allow_waits(Watch(stall_seconds=5), each).limit(long=False) for each in (60.0, math.inf)]
    [65.0, inf]
    >>> allow_waits(Watch(stall_seconds=0), 60.0) == Watch(stall_seconds=0)
    True
    """
    stall = watch.stall_seconds and watch.stall_seconds + seconds
    if stall == math.inf:
        return replace(watch, stall_seconds=0.0)
    return replace(
        watch, stall_seconds=stall, long_seconds=watch.long_seconds and max(watch.long_seconds, stall)
    )


class Heartbeat(NamedTuple):
    """The message that a rank sends about itself every second.

    Args:
      step: its current step, from 1; 0 before the first.
      num_collectives: number of collectives of all ranks (all-gathers, barriers) that it has joined.
      operation: its current operation.
      seconds: seconds since the operation began.
      waits, long, waits_for: see `activity.Activity`.
    """

    step: int
    num_collectives: int
    operation: str
    seconds: float
    waits: bool = False
    long: bool = False
    waits_for: tuple[int, ...] = ()

    @classmethod
    def of(cls, record: ActivityRecord, now_seconds: float) -> Self:
        """Return the heartbeat of this process.

        Args:
          record: its activity.
          now_seconds: the time by `time.monotonic`.
        """
        now = record.now()
        seconds = now_seconds - now.since_seconds
        return cls(
            record.step, record.num_collectives, now.operation, seconds, now.waits, now.long, now.waits_for
        )

    def encode(self) -> bytes:
        """Encode as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The reverse of `encode`."""
        heartbeat = cls(*json.loads(data))
        return heartbeat._replace(waits_for=tuple(heartbeat.waits_for))


def find_stalled(heartbeats: Mapping[int, Heartbeat], watch: Watch) -> list[int]:
    """Return the ranks that stall the run; [] while all are within their limits.

    A rank that waits for others is not to blame while one of them works within its limit.

    Args:
      heartbeats: rank -> its latest heartbeat, with its seconds counted up to now.
      watch: the limits.

    >>> working = Heartbeat(5, 8, "reading a batch", 700.0)
    >>> waiting = Heartbeat(5, 9, "combine gradients", 699.0, waits=True, waits_for=(1,))
    >>> both = {0: waiting, 1: working}
    >>> find_stalled(both, Watch()), find_stalled(both, Watch(stall_seconds=0))
    ([1], [])
    """
    # 1. a rank that works beyond its limit stalls the others, which wait for it
    working = [rank for rank, heartbeat in heartbeats.items() if not heartbeat.waits]
    if over := [rank for rank in working if heartbeats[rank].seconds > watch.limit(heartbeats[rank].long)]:
        return over
    if working:
        # ranks that work for ever in short operations
        waiting = max(heartbeat.seconds for heartbeat in heartbeats.values()) > watch.limit(True)
        return working if waiting else []
    # 2. all ranks wait for each other, once the limits of all are over
    if not all(heartbeat.seconds > watch.limit(heartbeat.long) for heartbeat in heartbeats.values()):
        return []
    return _find_blocking(heartbeats)


def _find_blocking(heartbeats: Mapping[int, Heartbeat]) -> list[int]:
    """Return the ranks that joined the fewest collectives, or only those of them for which others wait."""
    # the others wait for a rank that joined fewer collectives than they did
    fewest = min(heartbeat.num_collectives for heartbeat in heartbeats.values())
    behind = [rank for rank, heartbeat in heartbeats.items() if heartbeat.num_collectives == fewest]
    awaited = {other for rank in behind for other in heartbeats[rank].waits_for}
    waited_for = [rank for rank in behind if rank in awaited and not heartbeats[rank].waits_for]
    return waited_for or behind


def activity_text(heartbeat: Heartbeat | None) -> str:
    """Describe the last known activity of a rank.

    >>> activity_text(Heartbeat(12, 30, "combine gradients", 21.4))
    "at step 12, in 'combine gradients' for 21 s"
    """
    if heartbeat is None:
        return "no heartbeat yet"
    step = f"step {heartbeat.step}" if heartbeat.step else "the start"
    return f"at {step}, in {heartbeat.operation!r} for {heartbeat.seconds:.0f} s"


def stall_text(
    culprits: Sequence[int], heartbeats: Mapping[int, Heartbeat], names: Sequence[str], watch: Watch
) -> str:
    """Return the message about ranks that take too long."""
    lines = [f"{names[rank]} makes no progress: {activity_text(heartbeats[rank])}" for rank in culprits[:8]]
    if len(culprits) == len(heartbeats) > 1:
        lines.append("all ranks wait for each other: a message was lost, or they run different operations")
    lines += _others_text(culprits, heartbeats, names)
    slowest = max(culprits, key=lambda rank: heartbeats[rank].seconds)
    field = "long" if heartbeats[slowest].long else "stall"
    limit = getattr(watch, f"{field}_seconds")
    more = math.ceil(2 * max(heartbeats[slowest].seconds, limit))
    lines.append(f"allowed are {limit:g} s; if it was only slow: --watch.{field}-seconds {more}")
    return format_diagnosis(lines)


def silence_text(
    silent: Mapping[int, float],
    causes: Mapping[int, str],
    heartbeats: Mapping[int, Heartbeat],
    names: Sequence[str],
    watch: Watch,
) -> str:
    """Return the message about ranks without heartbeats.

    Args:
      silent: rank -> seconds since its last heartbeat.
      causes: rank -> what is known of its process.
      heartbeats: rank -> its last heartbeat, as it was sent.
      names: rank -> its name.
      watch: the limits.
    """
    lines = []
    for rank, seconds in list(silent.items())[:8]:
        lines.append(f"{names[rank]} has sent no heartbeat for {seconds:.0f} s: {causes[rank]}")
        lines.append(f"  its last heartbeat: {activity_text(heartbeats.get(rank))}")
    lines += _others_text(list(silent), heartbeats, names)
    more = math.ceil(2 * max(silent.values()))
    allowed = f"allowed are {watch.silence_seconds:g} s"
    lines.append(f"{allowed}; if it was only slow: --watch.silence-seconds {more}")
    return format_diagnosis(lines)


def _others_text(
    culprits: Sequence[int], heartbeats: Mapping[int, Heartbeat], names: Sequence[str]
) -> list[str]:
    others = [rank for rank in sorted(heartbeats) if rank not in culprits]
    lines = [f"  {names[rank]}: {activity_text(heartbeats[rank])}" for rank in others[:8]]
    return [*lines, *([f"  and {len(others) - 8} more"] if len(others) > 8 else [])]


def format_diagnosis(lines: Sequence[str]) -> str:
    """Format the lines of a diagnosis, with what happens next."""
    first, *rest = lines
    again = (
        f"-> all ranks end with exit code {TEMPORARY_FAILURE}; the same command resumes from the last"
        " checkpoint (launch --restarts N does that automatically)"
    )
    return "\n".join([f"shardtrain watchdog: {first}", *(f"  {line}" for line in [*rest, again])]) + "\n"


class Peer(NamedTuple):
    """Name, host and process of a rank.

    Args:
      name: its name in messages.
      host: its host.
      pid: its process id.
    """

    name: str
    host: str
    pid: int


def cause_text(peer: Peer, here: str) -> str:
    """Return the likely cause of a silent rank, from the state of its process.

    Args:
      peer: the rank.
      here: the host of this process.

    >>> cause_text(Peer("island 1 (host b)", "b", 12), "a")
    'it is stopped, host b is down, or the network between it and host a is cut'
    """
    if peer.host != here:
        return f"it is stopped, host {peer.host} is down, or the network between it and host {here} is cut"
    if (state := read_process_state(peer.pid)) is None:
        return f"its process {peer.pid} is gone"
    return f"its process {peer.pid} {STATES.get(state, 'is there, but its Python does not run')}"


def is_at_work(peer: Peer, here: str, seconds: float, watch: Watch) -> bool:
    """Return whether a rank without heartbeats still works: a library may hold Python's lock there.

    Args:
      peer: the rank.
      here: the host of this process.
      seconds: seconds since its last heartbeat.
      watch: the limits.
    """
    if peer.host != here or seconds > watch.silent_work_seconds:
        return False
    return read_process_state(peer.pid) not in (None, *STATES)


def read_process_state(pid: int) -> str | None:
    """Return the state of a process as Linux's letter for it; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


STATES: Mapping[str, str] = {
    "T": "is stopped (by SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "is dead",
    "X": "is dead",
    "D": "waits in the kernel, for a disk or a file system",
}
