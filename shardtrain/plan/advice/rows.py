"""Measured rows for predictions: read from a CSV file. No jax."""

import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardtrain.errors.messages import near, problems_error
from shardtrain.system.plain_text import read_csv
from shardtrain.system.untrusted_files import read_text

MOST_FILE_BYTES = 1 << 24
TEXTS = ("model", "device")


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """What was measured of one run; the fields are the columns of a file of rows.

    Args:
      model: a name; rows of the same name are left out together when a fit is judged.
      device: the kind of its devices, a name.
      devices: number of devices.
      teraflops: 10**12 floating point operations of a step, of all devices, with recomputation.
      parameter_mb: 10**6 bytes of gradients as they are sent.
      step_seconds: of a step.
      checkpoint_mb: 10**6 bytes of a checkpoint.
      checkpoint_seconds: for which a save keeps the run waiting.
      startup_seconds: from the start of the program to the end of the first step, or of a restart.
    """

    model: str
    device: str
    devices: int = 1
    teraflops: float | None = None
    parameter_mb: float | None = None
    step_seconds: float | None = None
    checkpoint_mb: float | None = None
    checkpoint_seconds: float | None = None
    startup_seconds: float | None = None


COLUMNS = tuple(each.name for each in fields(MeasuredRow))


def read_rows(path: Path) -> list[MeasuredRow]:
    """Read rows from a CSV file whose first line names columns, those of `MeasuredRow`; empty: not measured.

    Raises:
      ValueError: it cannot be read; lists unknown columns, and values that are no numbers above 0.
    """
    try:
        names, table = read_csv(read_text(path, MOST_FILE_BYTES))
    except OSError as error:
        raise ValueError(f"there is no file of rows {path} to read: {error.strerror or error}") from error
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    problems = [f"unknown column {near(name, COLUMNS)}" for name in names if name not in COLUMNS]
    problems += [f"there is no column {name}" for name in TEXTS if name not in names]
    if problems:
        raise problems_error(f"{path} has no rows of measurements", problems)
    rows = []
    for number, line in table:
        values = {name: _value(name, line[name], problems, number) for name in names}
        if None in line:
            problems.append(f"line {number} has more than {len(names)} cells")
        if not problems:
            rows.append(MeasuredRow(**{name: value for name, value in values.items() if value is not None}))
    if problems:
        raise problems_error(f"{path} cannot be read", problems[:20])
    return rows


def _value(name: str, text: str | None, problems: list[str], line: int) -> Any:
    text = (text or "").strip()
    if name in TEXTS:
        if not text:
            problems.append(f"line {line} has no {name}")
        return text
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = name != "devices" or value == int(value if math.isfinite(value) else 0)
    if not (value > 0 and math.isfinite(value) and whole):
        kind = "a whole number from 1" if name == "devices" else "a number above 0, or nothing"
        problems.append(f"line {line}: {name} is {text!r}; use {kind}")
        return None
    return int(value) if name == "devices" else value
