"""Fit times of steps, saves and starts to measured rows, with few terms, and judge the fit on unseen models.

Source: Li, Walls and Guo 2020 (CM-DARE), https://arxiv.org/abs/2004.03072: a regression for each kind of
device, speed of a cluster that grows until servers or links are full. Next: `rows.py`, which reads rows.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from shardtrain.plan.advice.rows import MeasuredRow


class Fit(NamedTuple):
    """A sum of terms with coefficients that are not negative.

    Args:
      coefficients: of each term, in the unit of the result over that of the term.
      error: mean absolute error of the rows that were fitted, relative.
    """

    coefficients: tuple[float, ...]
    error: float

    def __call__(self, terms: Sequence[float]) -> float:
        """Return the result for these terms."""
        return float(np.dot(self.coefficients, terms))


def fit(terms: Sequence[Sequence[float]], results: Sequence[float]) -> Fit:
    """Fit results as a sum of terms with coefficients that are not negative, by least relative squares.

    All sets of terms are tried; the best one whose free solution is not negative is the constrained optimum.

    Args:
      terms: (rows, terms), at most a few terms.
      results: (rows,), above 0.

    >>> fit([(1, 2.0), (1, 4.0), (1, 6.0)], [5.0, 9.0, 13.0]).coefficients
    (1.0, 2.0)
    """
    matrix, target = np.asarray(terms, float), np.asarray(results, float)
    scaled, number = matrix / target[:, None], matrix.shape[1]
    best, least = np.zeros(number), np.inf
    for size in range(1, number + 1):
        for chosen in combinations(range(number), size):
            found, *_ = np.linalg.lstsq(scaled[:, list(chosen)], np.ones(len(target)), rcond=None)
            residual = float(((scaled[:, list(chosen)] @ found - 1) ** 2).sum())
            # more terms must bring more than rounding
            if (found >= 0).all() and residual < least * (1 - 1e-9) - 1e-18:
                best, least = np.zeros(number), residual
                best[list(chosen)] = found
    error = float(np.abs(scaled @ best - 1).mean())
    return Fit(tuple(float(f"{each:.12g}") for each in best), error)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something that is predicted from rows.

    Args:
      name: of the column with its seconds.
      terms: row -> the terms of its sum; None: the row lacks a column.
      names: of the terms, with units.
      by_device: whether each kind of device has a fit of its own.
    """

    name: str
    terms: Callable[[MeasuredRow], tuple[float, ...] | None]
    names: tuple[str, ...]
    by_device: bool = False


def _step_terms(row: MeasuredRow) -> tuple[float, ...] | None:
    if row.teraflops is None:
        return None
    # each device has its part of the work; in a ring it sends 2 (n - 1) / n of the gradients
    sent = 2 * (row.parameter_mb or 0.0) * (row.devices - 1) / row.devices
    return 1.0, row.teraflops / row.devices, sent


QUANTITIES = (
    Quantity(
        name="step_seconds",
        terms=_step_terms,
        names=("s", "s / teraflop of a device", "s / MB sent"),
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
    """Return the fit of each kind of device, or of all under the name ""; those without rows are left out."""
    kinds: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for row in rows:
        terms, result = quantity.terms(row), getattr(row, quantity.name)
        if terms is not None and result is not None:
            kinds.setdefault(row.device if quantity.by_device else "", []).append((terms, result))
    return {kind: fit(*zip(*pairs, strict=True)) for kind, pairs in kinds.items()}


def predicted(quantity: Quantity, found: Mapping[str, Fit], row: MeasuredRow) -> float | None:
    """Return the predicted seconds of a row; None where there is no fit for it, or a column is missing."""
    of_kind = found.get(row.device if quantity.by_device else "")
    terms = quantity.terms(row)
    return None if of_kind is None or terms is None else of_kind(terms)


def error_by_model(quantity: Quantity, rows: Sequence[MeasuredRow]) -> dict[str, float]:
    """Return model -> mean relative error of its rows, predicted from the rows of all other models."""
    errors = {}
    for model in dict.fromkeys(row.model for row in rows):
        found = fits(quantity, [row for row in rows if row.model != model])
        pairs = [
            (predicted(quantity, found, row), getattr(row, quantity.name))
            for row in rows
            if row.model == model
        ]
        wrong = [abs(guess / real - 1) for guess, real in pairs if guess is not None and real is not None]
        if wrong:
            errors[model] = statistics.mean(wrong)
    return errors


class Saturation(NamedTuple):
    """Speed of a cluster that grows with its devices until something is full: min(n s, cap).

    Args:
      per_device: s, what each device adds, such as teraflop/s.
      cap: what all together never exceed; inf if the rows show no such end.
    """

    per_device: float
    cap: float

    def speed(self, devices: float) -> float:
        """Return the speed of so many devices."""
        return min(devices * self.per_device, self.cap)

    @property
    def full_at(self) -> float:
        """The number of devices from which more bring nothing."""
        return self.cap / self.per_device


def saturation(devices: Sequence[int], speeds: Sequence[float]) -> Saturation:
    """Fit min(n s, cap) to speeds of one model on clusters of one kind, by least relative squares.

    Every split of the sorted rows into growing and full ones is tried.

    Args:
      devices: numbers of devices.
      speeds: of all of them together.

    >>> saturation([1, 2, 4, 8], [10.0, 20.0, 30.0, 30.0])
    Saturation(per_device=10.0, cap=30.0)
    """
    rows = sorted(zip(devices, speeds, strict=True))
    best, least = Saturation(rows[0][1] / rows[0][0], np.inf), np.inf
    # growth to the end comes first, and a single row says nothing of an end
    for split in (len(rows), *range(len(rows) - 2, 0, -1)):
        growing, full = rows[:split], rows[split:]
        rate = fit([(n,) for n, _ in growing], [x for _, x in growing])
        cap = fit([(1.0,)] * len(full), [x for _, x in full]).coefficients[0] if full else np.inf
        found = Saturation(rate.coefficients[0], float(cap))
        residual = sum((found.speed(n) / x - 1) ** 2 for n, x in rows)
        if residual < least - 1e-12:
            best, least = found, residual
    return best
