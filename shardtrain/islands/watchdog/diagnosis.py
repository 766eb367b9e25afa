"""Who keeps a run from going on, judged by what ranks told of themselves, and the sentence about it.

Values only: no thread, no clock, no MPI. Next: `watchdog.py`, which collects beats and acts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from shardtrain.errors.exit_codes import COME_AGAIN
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error
from shardtrain.islands.watchdog.activity import ActivityRecord

LEAST_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """When a run that does not go on is ended.

    Args:
      silence_seconds: a rank that is not heard of for so long is lost: stopped, or its host or the network
        is down; 0 never.
      stall_seconds: a step, a batch, a message between islands may take so long; 0: for ever.
      long_seconds: the same of what may take hours: compiling, restoring, saving, evaluating; 0: for ever.

    Raises:
      ValueError: lists every value of a wrong kind or out of range.
    """

    silence_seconds: float = 20.0
    stall_seconds: float = 600.0
    long_seconds: float = 5 * 60 * 60.0

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        problems += [
            f"{name} is {value}; use 0 for never, or {LEAST_SECONDS:.0f} or more"
            for name, value in vars(self).items()
            if value != 0 and not LEAST_SECONDS <= value < math.inf
        ]
        if 0 < self.long_seconds < self.stall_seconds:
            problems.append(
                f"long_seconds is {self.long_seconds}, and stall_seconds, for what is shorter, is"
                f" {self.stall_seconds}; use {self.stall_seconds} or more for long_seconds"
            )
        if problems:
            raise problems_error("a run cannot be watched like this", problems)

    def limit(self, long: bool) -> float:
        """How long an operation may take."""
        return (self.long_seconds if long else self.stall_seconds) or math.inf

    @property
    def silent_work_seconds(self) -> float:
        """How long a rank whose process is well may be silent; never for ever, for nothing else tells of it.

        >>> Watch().silent_work_seconds, Watch(stall_seconds=0, long_seconds=0).silent_work_seconds
        (600.0, 20.0)
        """
        return self.stall_seconds or self.long_seconds or self.silence_seconds


class Heartbeat(NamedTuple):
    """What a rank tells of itself every second.

    Args:
      step: the step that it is doing, from 1; 0 before the first.
      meetings: how many meetings of all ranks it has come to.
      operation: where it is.
      seconds: for how long.
      waits, long, waits_for: see `marks.Activity`.
    """

    step: int
    meetings: int
    operation: str
    seconds: float
    waits: bool = False
    long: bool = False
    waits_for: tuple[int, ...] = ()

    @classmethod
    def of(cls, marks: ActivityRecord, now_seconds: float) -> Self:
        """That of this process.

        Args:
          marks: where it is.
          now_seconds: by `time.monotonic`.
        """
        mark = marks.now()
        seconds = now_seconds - mark.since_seconds
        return cls(marks.step, marks.meetings, mark.operation, seconds, mark.waits, mark.long, mark.waits_for)

    def encode(self) -> bytes:
        """As bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The reverse of `encode`."""
        beat = cls(*json.loads(data))
        return beat._replace(waits_for=tuple(beat.waits_for))


def stalled(beats: Mapping[int, Heartbeat], watch: Watch) -> list[int]:
    """The ranks that keep the others from going on; [] while nobody takes too long.

    Whoever waits for others is not to blame while one of these is at work of its own, within the limit
    of that work.

    Args:
      beats: rank -> where it is now.
      watch: the limits.

    >>> working = Heartbeat(5, 8, "reading a batch", 700.0)
    >>> waiting = Heartbeat(5, 9, "combine gradients", 699.0, waits=True, waits_for=(1,))
    >>> stalled({0: waiting, 1: working}, Watch()), stalled({0: waiting, 1: working}, Watch(stall_seconds=0))
    ([1], [])
    """
    working = [rank for rank, beat in beats.items() if not beat.waits]
    if over := [rank for rank in working if beats[rank].seconds > watch.limit(beats[rank].long)]:
        return over
    if working:
        # at work for ever, a little at a time
        waiting = max(beat.seconds for beat in beats.values()) > watch.limit(True)
        return working if waiting else []
    if not all(beat.seconds > watch.limit(beat.long) for beat in beats.values()):
        return []
    return _hold_up(beats)


def _hold_up(beats: Mapping[int, Heartbeat]) -> list[int]:
    """Where all wait: those that have come to the fewest meetings; of these, those for whom others wait."""
    fewest = min(beat.meetings for beat in beats.values())
    behind = [rank for rank, beat in beats.items() if beat.meetings == fewest]
    awaited = {other for rank in behind for other in beats[rank].waits_for}
    waited_for = [rank for rank in behind if rank in awaited and not beats[rank].waits_for]
    return waited_for or behind


def place_text(beat: Heartbeat | None) -> str:
    """Where a rank is.

    >>> place_text(Heartbeat(12, 30, "combine gradients", 21.4))
    "at step 12, in 'combine gradients' for 21 s"
    """
    if beat is None:
        return "nothing was heard of it yet"
    step = f"step {beat.step}" if beat.step else "the start"
    return f"at {step}, in {beat.operation!r} for {beat.seconds:.0f} s"


def stall_text(
    culprits: Sequence[int], beats: Mapping[int, Heartbeat], names: Sequence[str], watch: Watch
) -> str:
    """The sentence about ranks that take too long."""
    lines = [f"{names[rank]} does not go on: {place_text(beats[rank])}" for rank in culprits[:8]]
    if len(culprits) == len(beats) > 1:
        lines.append("all ranks wait for each other: a message was lost, or they take different ways")
    lines += _others(culprits, beats, names)
    slowest = max(culprits, key=lambda rank: beats[rank].seconds)
    field = "long" if beats[slowest].long else "stall"
    limit = getattr(watch, f"{field}_seconds")
    more = math.ceil(2 * max(beats[slowest].seconds, limit))
    lines.append(f"allowed are {limit:g} s; if it was only slow: --watch.{field}-seconds {more}")
    return told(lines)


def silence_text(
    silent: Mapping[int, float],
    causes: Mapping[int, str],
    beats: Mapping[int, Heartbeat],
    names: Sequence[str],
    watch: Watch,
) -> str:
    """The sentence about ranks that are not heard of.

    Args:
      silent: rank -> seconds since its last beat.
      causes: rank -> what is known of its process.
      beats: rank -> its last one, as it was then.
      names: of all ranks.
      watch: the limits.
    """
    lines = []
    for rank, seconds in list(silent.items())[:8]:
        lines.append(f"{names[rank]} has not been heard of for {seconds:.0f} s: {causes[rank]}")
        lines.append(f"  its last beat: {place_text(beats.get(rank))}")
    lines += _others(list(silent), beats, names)
    more = math.ceil(2 * max(silent.values()))
    allowed = f"allowed are {watch.silence_seconds:g} s"
    lines.append(f"{allowed}; if it was only slow: --watch.silence-seconds {more}")
    return told(lines)


def _others(culprits: Sequence[int], beats: Mapping[int, Heartbeat], names: Sequence[str]) -> list[str]:
    others = [rank for rank in sorted(beats) if rank not in culprits]
    lines = [f"  {names[rank]}: {place_text(beats[rank])}" for rank in others[:8]]
    return [*lines, *([f"  and {len(others) - 8} more"] if len(others) > 8 else [])]


def told(lines: Sequence[str]) -> str:
    """A message of lines, with what happens now."""
    first, *rest = lines
    again = (
        f"-> all ranks end with exit code {COME_AGAIN}; the same command goes on from the last checkpoint"
        " (launch --restarts N gives it again by itself)"
    )
    return "\n".join([f"shardtrain watchdog: {first}", *(f"  {line}" for line in [*rest, again])]) + "\n"
