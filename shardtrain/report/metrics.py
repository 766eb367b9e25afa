"""Values that merge over steps and devices, and the sinks that a run writes them to.

Owns `metrics.jsonl` and is the one door to tensorboardX. No jax: what comes in are numbers that have left
the device. What people read on the terminal is in `report/progress.py`, the curve in `report/plots/`.
"""

import importlib
import importlib.util
import json
import logging
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from shardtrain.system.atomic_write import replace_file
from shardtrain.system.log_file import LogFile
from shardtrain.system.untrusted_files import open_regular

_LOG = logging.getLogger(__name__)

NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean that merges: a sum and the count it is over (examples or tokens).

    `+` merges two, `Mean()` is neutral, and `sum(parts, Mean())` merges many, so a mean over steps, devices
    or uneven batches is the mean over all that they hold.

    Args:
        sum: the sum of the values.
        count: how many values, or their total weight; at least 0.

    Raises:
        ValueError: the count is negative.

    Examples:
        >>> (Mean(sum=6.0, count=2) + Mean(sum=3.0, count=1)).value
        3.0
        >>> print(Mean().value)
        None
    """

    sum: float = 0.0
    count: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(
                f"a mean over count {self.count:g} was asked for. A count is 0 or more: "
                "pass how many values the sum is over."
            )

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def value(self) -> float | None:
        """Sum over count; None where nothing was counted."""
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Units per second over the last steps, without the first, which compiles.

    A value: `after` and `paused` return the next one. The caller reads the clock.

    Args:
        window_steps: how many of the last calls of `after` the rate is over; at least 1.
        marks: (seconds, units until then), oldest first; leave it out.

    Raises:
        ValueError: the window is shorter than one step, or (`after`) the clock ran backwards.

    Examples:
        >>> rate = Rate().after(now_seconds=60.0, units=512)
        >>> print(rate.per_second)
        None
        >>> rate.after(now_seconds=62.0, units=512).per_second
        256.0
    """

    window_steps: int = 50
    marks: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.window_steps < 1:
            raise ValueError(
                f"a rate over {self.window_steps} steps was asked for. Use window_steps=1 or more."
            )

    def after(self, *, now_seconds: float, units: float) -> "Rate":
        """The rate once `units` more are done at `now_seconds`; the first call only starts the clock."""
        last_seconds, total = self.marks[-1] if self.marks else (now_seconds, 0.0)
        if now_seconds < last_seconds:
            raise ValueError(
                f"a rate was asked for at {now_seconds:g} s, before its last step at {last_seconds:g} s. "
                "Pass times of one clock that does not run backwards, such as time.monotonic()."
            )
        marks = (*self.marks, (now_seconds, total + units))
        return replace(self, marks=marks[-self.window_steps - 1 :])

    def paused(self, seconds: float) -> "Rate":
        """The rate as if `seconds` since the last step had not passed (held-out evaluation, a checkpoint)."""
        return replace(self, marks=tuple((at + seconds, total) for at, total in self.marks))

    @property
    def per_second(self) -> float | None:
        """Units per second; None until a step after the first took time."""
        if not self.marks:
            return None
        (start_seconds, start_units), (end_seconds, end_units) = self.marks[0], self.marks[-1]
        elapsed_seconds = end_seconds - start_seconds
        return (end_units - start_units) / elapsed_seconds if elapsed_seconds > 0 else None


class Sink(Protocol):
    """Where metrics go. One line per step: what belongs to a step is written in one call."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step, by name (`train/loss`, `heldout/loss`, `tokens_per_second`)."""
        ...

    def close(self) -> None:
        """Finish what is under way and let go of the files."""
        ...


class Progress(Protocol):
    """What a loop tells the person who waits; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show that `step` is done.

        Args:
            step: steps done since the start of the run, resumed or not.
            values: as in the sinks; only `train/loss`, `heldout/loss` and `<unit>_per_second` are shown.
        """
        ...

    def note(self, text: str) -> None:
        """Say something (a checkpoint saved, a warning) without breaking the bar."""
        ...


class JsonLines:
    """A sink of one JSON object per line, `{"step": 3, "train/loss": 2.5}`, on the disk after each write.

    Strict JSON: what is not finite is written as the strings "NaN", "Infinity" and "-Infinity", which `float`
    reads. Opening cuts the file back to the restored step by writing it anew beside itself and renaming, so a
    crash leaves the old file or the new one, and each step stands once.

    Args:
        path: the file; its folder is made.
        resume_after: the restored step; later lines are dropped, as is a torn last line. None: nothing was
            restored, and the file starts empty.
        report: told when it cannot be written any more, see `LogFile`.

    Attributes:
        last_step: of the last line that was kept; None where none was.

    Raises:
        ValueError: a line before the last is no record; or (`write`) a value is named `step`.
    """

    def __init__(
        self, path: Path | str, *, resume_after: int | None, report: Callable[[str], None] = _LOG.warning
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int | None = None
        if resume_after is not None and path.exists():
            self.last_step = _cut(path, resume_after)
        self._file = LogFile(path, append=resume_after is not None, report=report)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if "step" in values:
            raise ValueError(
                "a metric named 'step' was written, but each line has that key. Give it another name."
            )
        record = {"step": int(step)} | {name: strict(float(value)) for name, value in values.items()}
        self._file.write(f"{json.dumps(record, allow_nan=False)}\n".encode())

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path | str) -> list[dict[str, float]]:
    """Read what `JsonLines` wrote.

    Args:
        path: the file, of a finished, running or crashed run.

    Returns:
        One dict per line in the file's order: `step` an int, the other values floats ("NaN", "Infinity",
        "-Infinity" as what they say, null as nan). A torn last line is left out.

    Raises:
        ValueError: a line before the last is no record.
    """
    return [record for _, record in _records(Path(path))]


class TensorBoard:
    """A sink of TensorBoard event files, of tensorboardX's events.

    tensorboardX's own writer is left alone: its thread ends when the disk is full, and what is written then
    waits for it without end.

    Args:
        folder: where the event files go, one more at each start.
        resume_after: the restored step; TensorBoard hides what earlier files hold after it. None: all of it.
        report: told when they cannot be written any more, see `LogFile`.

    Raises:
        ValueError: tensorboardX is not installed.
    """

    def __init__(
        self, folder: Path | str, *, resume_after: int | None, report: Callable[[str], None] = _LOG.warning
    ) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise ValueError(_missing_tensorboard()) from error
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        # two of the same second have names of their own
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{earlier:04d}"
        self._file = LogFile(folder / name, append=False, report=report)
        self._closed = False
        first = 0 if resume_after is None else resume_after + 1
        self._events: Any = importlib.import_module(f"{tensorboardX.__name__}.proto.event_pb2")
        self._add(file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step=first, session_log=start)

    @staticmethod
    def installed() -> bool:
        """Whether the extra `tensorboard` is there."""
        return importlib.util.find_spec("tensorboardX") is not None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        if self._closed:
            raise ValueError(
                f"step {step} was written to a TensorBoard sink after close(). Open another sink."
            )
        for name, value in values.items():
            self._add(step=step, summary=scalar(name, float(value)))

    def close(self) -> None:
        self._closed = True
        self._file.close()

    def _add(self, **event: Any) -> None:
        """A record: length, its checksum, the event, its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        data = self._events.Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", masked_crc32c(each)) for each in (length, data)]
        self._file.write(length + checksums[0] + data + checksums[1])


class Sinks:
    """Several sinks as one.

    Args:
        sinks: written in this order; all are closed, whatever fails on the way.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def strict(value: float) -> float | str:
    """A number as strict JSON has it; `float` reads it."""
    return value if math.isfinite(value) else NOT_FINITE.get(value, "NaN")


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    unreadable = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            if unreadable:
                raise ValueError(_unreadable_line(path, unreadable))
            record = _parse(line)
            if record is None:
                unreadable = number
            else:
                yield line.rstrip(b"\r\n") + b"\n", record


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        record = json.loads(line)
        step = record.pop("step")
        values = {name: math.nan if value is None else float(value) for name, value in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return {"step": step} | values if type(step) is int else None


def _cut(path: Path, resume_after: int) -> int | None:
    """Drop the lines of later steps; returns the step of the last line that is left."""
    left = [(line, record["step"]) for line, record in _records(path) if record["step"] <= resume_after]
    kept, last_step = b"".join(line for line, _ in left), int(left[-1][1]) if left else None
    is_own = not path.is_symlink() and path.stat().st_nlink == 1
    if is_own and kept == path.read_bytes():
        # nothing to write, on a disk that may be full
        return last_step
    try:
        # a new file, so that what has another name elsewhere is not added to
        replace_file(path, kept)
    except OSError as error:
        raise OSError(
            f"{path} cannot be cut back to step {resume_after}, from where the run goes on: {error}. Free"
            " space, or make the folder writable"
        ) from error
    return last_step


def _unreadable_line(path: Path, number: int) -> str:
    return (
        f"metrics were read from {path}, but line {number} is no record. Each line is one JSON object with "
        f"an integer 'step' and numbers; only the last may be torn. Delete line {number}, "
        "or move the file away."
    )


def _missing_tensorboard() -> str:
    return (
        "a TensorBoard sink was asked for, but tensorboardX is not installed. It comes with the extra "
        "'tensorboard': install shardtrain[tensorboard], or leave the TensorBoard sink out."
    )
