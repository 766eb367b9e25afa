"""Fit times of steps, saves and starts to measured rows, and estimate the error on unseen models. No jax.

Source: Li, Walls and Guo 2020 (CM-DARE), https://arxiv.org/abs/2004.03072: a regression for each kind of
device.
"""

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from shardtrain.errors.messages import near, refuse
from shardtrain.system.plain_text import read_csv
from shardtrain.system.untrusted_files import read_text

MOST_FILE_BYTES = 1 << 24
TEXTS = ("model", "device")


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """Measurements of one run; the fields are the columns of a file of rows.

    Args:
      model: name of the model; its rows are left out together to estimate an error.
      device: kind of its devices.
      devices: number of devices.
      teraflops: 10**12 floating point operations of a step on all devices, with recomputation.
      operations: number of operations that a step starts, or of tensors; each costs time, however small.
      parameter_mb: 10**6 bytes of gradients as they are sent.
      step_seconds: seconds of a step.
      checkpoint_mb: 10**6 bytes of a checkpoint.
      checkpoint_seconds: seconds for which a save stops the training.
      startup_seconds: seconds from a start or restart of the program to the end of its first step.
    """

    model: str
    device: str
    devices: int = 1
    teraflops: float | None = None
    operations: float | None = None
    parameter_mb: float | None = None
    step_seconds: float | None = None
    checkpoint_mb: float | None = None
    checkpoint_seconds: float | None = None
    startup_seconds: float | None = None


COLUMNS = tuple(each.name for each in fields(MeasuredRow))


def read_rows(path: Path) -> list[MeasuredRow]:
    """Read rows from a CSV file whose first line names fields of `MeasuredRow`; an empty cell is None.

    Raises:
      ValueError: it cannot be read; lists unknown columns, and values that are not numbers above 0.
    """
    try:
        names, table = read_csv(read_text(path, MOST_FILE_BYTES))
    except OSError as error:
        raise ValueError(f"there is no file of rows {path} to read: {error.strerror or error}") from error
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    problems = [f"unknown column {near(name, COLUMNS)}" for name in names if name not in COLUMNS]
    problems += [f"there is no column {name}" for name in TEXTS if name not in names]
    refuse(f"{path} has no rows of measurements", problems)
    rows = []
    for number, line in table:
        values = {name: _read_value(name, line[name], problems, number) for name in names}
        if None in line:
            problems.append(f"line {number} has more than {len(names)} cells")
        if not problems:
            rows.append(MeasuredRow(**{name: value for name, value in values.items() if value is not None}))
    refuse(f"{path} cannot be read", problems[:20])
    return rows


def _read_value(name: str, text: str | None, problems: list[str], line: int) -> Any:
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


class Fit(NamedTuple):
    """A sum of terms with coefficients that are not negative.

    Args:
      coefficients: coefficient of each term.
      error: mean relative error of the fitted rows.
    """

    coefficients: tuple[float, ...]
    error: float

    def __call__(self, terms: Sequence[float]) -> float:
        """Return the result for these terms."""
        return float(np.dot(self.coefficients, terms))


def fit(terms: Sequence[Sequence[float]], results: Sequence[float]) -> Fit:
    """Fit results as a sum of terms with coefficients that are not negative, by least relative squares.

    Args:
      terms: (rows, terms), at most a few terms.
      results: (rows,), above 0.

    >>> fit([(1, 2.0), (1, 4.0), (1, 6.0)], [5.0, 9.0, 13.0]).coefficients
    (1.0, 2.0)
    """
    matrix, target = np.asarray(terms, float), np.asarray(results, float)
    scaled = matrix / target[:, None]
    # columns of one size, so that rounding is the same for all
    sizes = np.linalg.norm(scaled, axis=0)
    sizes[sizes == 0] = 1.0
    best = nnls(scaled / sizes, np.ones(len(target)))[0] / sizes
    error = float(np.abs(scaled @ best - 1).mean())
    return Fit(tuple(float(f"{each:.12g}") for each in best), error)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A quantity that is predicted from rows.

    Args:
      name: name of the column with its seconds.
      terms: row -> terms of its sum; None if the row lacks a column.
      names: names of the terms, with units.
      by_device: whether each kind of device is fitted separately.
    """

    name: str
    terms: Callable[[MeasuredRow], tuple[float, ...] | None]
    names: tuple[str, ...]
    by_device: bool = False


def _step_terms(row: MeasuredRow) -> tuple[float, ...] | None:
    if row.teraflops is None:
        return None
    # each device has its share of the work, and sends 2 (n - 1) / n of the gradients in a ring
    sent = 2 * (row.parameter_mb or 0.0) * (row.devices - 1) / row.devices
    return 1.0, row.teraflops / row.devices, sent, row.operations or 0.0


QUANTITIES = (
    Quantity(
        name="step_seconds",
        terms=_step_terms,
        names=("s", "s / teraflop of a device", "s / MB sent", "s / operation"),
        by_device=True,
    ),
    Quantity(
        name="checkpoint_seconds",
        terms=lambda row: None if row.checkpoint_mb is None else (1.0, row.checkpoint_mb),
        names=("s", "s / MB"),
    ),
    Quantity(name="startup_seconds", terms=lambda row: (1.0, float(row.devices)), names=("s", "s / device")),
)


def fits(quantity: Quantity, rows: Sequence[MeasuredRow]) -> dict[str, Fit]:
    """Return the fit of each kind of device with rows, or of all devices with the name ""."""
    kinds: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for row in rows:
        terms, result = quantity.terms(row), getattr(row, quantity.name)
        if terms is not None and result is not None:
            kinds.setdefault(row.device if quantity.by_device else "", []).append((terms, result))
    return {kind: fit(*zip(*pairs, strict=True)) for kind, pairs in kinds.items()}


def predict(quantity: Quantity, found: Mapping[str, Fit], row: MeasuredRow) -> float | None:
    """Return the predicted seconds of a row; None if there is no fit for it, or it lacks a column."""
    of_kind = found.get(row.device if quantity.by_device else "")
    terms = quantity.terms(row)
    return None if of_kind is None or terms is None else of_kind(terms)


def error_by_model(quantity: Quantity, rows: Sequence[MeasuredRow]) -> dict[str, float]:
    """Return model -> mean relative error of its rows, if predicted from the rows of all other models."""
    errors = {}
    for model in dict.fromkeys(row.model for row in rows):
        found = fits(quantity, [row for row in rows if row.model != model])
        pairs = [
            (predict(quantity, found, row), getattr(row, quantity.name)) for row in rows if row.model == model
        ]
        wrong = [abs(guess / real - 1) for guess, real in pairs if guess is not None and real is not None]
        if wrong:
            errors[model] = statistics.mean(wrong)
    return errors
