"""Write and read `metrics.jsonl`: one line of strict JSON for each step."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shardtrain.system.atomic_write import replace_file
from shardtrain.system.log_file import LogFile
from shardtrain.system.plain_text import is_blank
from shardtrain.system.untrusted_data import parse_record, read_lines
from shardtrain.system.untrusted_files import open_regular, read_bytes

_LOG = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""The file in the folder of a run."""

NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def open_json_lines(
    folder: Path, resume_after: int | None, report: Callable[[str], None], *, is_shared: bool = False
) -> "JsonLines":
    """Open the metrics of a run."""
    return JsonLines(folder / METRICS, resume_after=resume_after, is_shared=is_shared, report=report)


class JsonLines:
    """A sink of one JSON object per line, `{"step": 3, "train/loss": 2.5}`, unbuffered.

    Values that are not finite are written as the strings "NaN", "Infinity" and "-Infinity", which `float`
    reads. Opening the file drops the lines after the restored step: it is rewritten and renamed, so that a
    crash leaves the old file or the new one.

    Args:
        path: the file; its folder is created.
        resume_after: the restored step, after which lines are dropped, as is an incomplete last line; None
            starts an empty file.
        is_shared: whether several processes write the file, one after the other: each puts a new file in its
            place, so that an earlier one which was only frozen writes nothing into it.
        report: receives a warning if the file cannot be written, see `LogFile`.

    Attributes:
        last_step: the step of the last line that was kept; None without one.

    Raises:
        ValueError: a line before the last is not a record; or (`write`) a value is named `step`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        resume_after: int | None,
        is_shared: bool = False,
        report: Callable[[str], None] = _LOG.warning,
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int | None = None
        if (is_shared or resume_after is not None) and path.exists():
            self.last_step = _cut(path, resume_after or 0, always=is_shared)
        append = is_shared or resume_after is not None
        self._file = LogFile(path, append=append, is_shared=is_shared, report=report)

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
        One dict per line: `step` an int, the other values floats ("NaN", "Infinity" and "-Infinity" are
        converted, null becomes nan). An incomplete last line is left out.

    Raises:
        ValueError: a line before the last is no record.
    """
    return [record for _, record in _records(Path(path))]


def strict(value: float) -> float | str:
    """Convert a number to a value of strict JSON, which `float` reads."""
    return value if math.isfinite(value) else NOT_FINITE.get(value, "NaN")


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    unreadable = 0
    with open_regular(path) as file:
        for number, line in enumerate(read_lines(file), start=1):
            if is_blank(line):
                continue
            if unreadable:
                raise ValueError(
                    f"metrics were read from {path}, but line {unreadable} is not a record. Each line is one"
                    " JSON object with an integer 'step' and numbers; only the last may be incomplete. Delete"
                    f" line {unreadable}, or move the file away."
                )
            record = _parse(line)
            if record is None:
                unreadable = number
            else:
                yield line.rstrip(b"\r\n") + b"\n", record


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        record = parse_record(line)
        step = record.pop("step")
        values = {name: math.nan if value is None else float(value) for name, value in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return {"step": step} | values if type(step) is int else None


def _cut(path: Path, resume_after: int, *, always: bool) -> int | None:
    """Drop the lines of later steps; return the step of the last line that is kept.

    always: make a new file even if no line is dropped.
    """
    left = [(line, record["step"]) for line, record in _records(path) if record["step"] <= resume_after]
    kept, last_step = b"".join(line for line, _ in left), int(left[-1][1]) if left else None
    is_own = not path.is_symlink() and path.stat().st_nlink == 1
    if is_own and not always and kept == read_bytes(path, 1 << 40):
        # nothing to write; the disk may be full
        return last_step
    try:
        # a new file, so that another hard link to the old one is not written to
        replace_file(path, kept)
    except OSError as error:
        raise OSError(
            f"{path} cannot be truncated to step {resume_after}, from which the run resumes: {error}. Free"
            " space, or make the folder writable"
        ) from error
    return last_step
