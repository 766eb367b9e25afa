"""Fit the five constants of a machine's cost model to measured steps. No jax.

Next: `machine.py`; `trainer/planned.py`, which measures the steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from shardtrain.plan.machine import Link, Machine
from shardtrain.plan.prediction import Prediction

Predict = Callable[[Machine], Sequence[float]]
"""Machine -> predicted seconds of each measured step."""

PRIOR = 0.1
"""Weight of the constants before the fit: a constant that changes by a factor of e costs as much as a step
that is predicted 10 % wrong."""

LEAST = 1e-12
"""Seconds that replace 0, which has no logarithm."""

SLOWEST = 4.0
"""Steps that are predicted to be more than this number of times slower than the fastest are not measured."""


@dataclass(frozen=True, kw_only=True)
class FittedMachine:
    """A machine whose constants were fitted, and how well it predicts each measured step.

    Args:
      machine: the machine.
      before: predicted over measured seconds of each step, before the fit.
      after: the same, after the fit.
      left_out: the same, after a fit to all other steps.
    """

    machine: Machine
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...]


def fit_rates(start: Machine, predict: Predict, measured: Sequence[float]) -> FittedMachine:
    """Fit rates, kernel time, link and latency by least squares of the logarithms of seconds.

    Args:
      start: the constants to start from. A constant that no step depends on keeps its value. All devices are
        assumed to have one kind of link.
      predict: predicts the measured steps.
      measured: seconds of these steps.

    Raises:
      ValueError: there are fewer than two steps, or one took no time.
    """
    if len(measured) < 2 or min(measured) <= 0:
        raise ValueError(
            f"{len(measured)} steps were measured ({list(measured)}); give two or more, above 0 s"
        )
    logs, first = np.log(measured), _constants(start)

    def residuals(x: np.ndarray, kept: Sequence[int]) -> np.ndarray:
        found = np.log(np.asarray(predict(_machine(start, x))))
        return np.concatenate([(found - logs)[list(kept)], PRIOR * (x - first)])

    def fit(kept: Sequence[int]) -> Machine:
        return _machine(start, least_squares(residuals, first, args=(kept,)).x)

    def ratios(machine: Machine) -> tuple[float, ...]:
        return tuple(float(x) for x in np.asarray(predict(machine)) / np.asarray(measured))

    every = range(len(measured))
    machine = fit(every)
    others = [ratios(fit([i for i in every if i != out]))[out] for out in every]
    return FittedMachine(
        machine=machine, before=ratios(start), after=ratios(machine), left_out=tuple(map(float, others))
    )


def _constants(machine: Machine) -> np.ndarray:
    rates, link = machine.rates, machine.device_link
    found = (
        rates.flops_per_second,
        min(rates.memory_bytes_per_second, 1 / LEAST),
        max(rates.kernel_seconds, LEAST),
        min(link.bytes_per_second, 1 / LEAST),
        max(link.latency_seconds, LEAST),
    )
    return np.log(found)


def _machine(start: Machine, logarithms: np.ndarray) -> Machine:
    flops, moved, kernel, sent, latency = (math.exp(x) for x in logarithms)
    rates = replace(start.rates, flops_per_second=flops, memory_bytes_per_second=moved, kernel_seconds=kernel)
    link = Link(bytes_per_second=sent, latency_seconds=latency)
    return replace(start, rates=rates, device_link=link, node_link=link)


def choose_spread(predicted: Sequence[Prediction], number: int) -> list[int]:
    """Choose steps that spend their time as differently as possible.

    The first is the step that is predicted to be fastest. Each further one is the farthest from the steps
    before it, by the logarithms of its seconds of computation, collectives, update and waiting.

    Args:
      predicted: the steps to choose from.
      number: number of steps to choose.

    Returns:
      Positions in `predicted`, at most `number`.
    """
    totals = np.array([each.seconds.total for each in predicted])
    all_seconds = [each.seconds for each in predicted]
    parts = np.array([(s.compute, sum(s.collectives.values()), s.update, s.bubble) for s in all_seconds])
    # a part below a hundredth of the step does not matter
    points = np.log(np.maximum(parts, 0.01 * totals[:, None]))
    allowed = totals <= SLOWEST * totals.min()
    chosen = [int(totals.argmin())]
    distances = np.where(allowed, np.inf, -1.0)
    while len(chosen) < min(number, int(allowed.sum())):
        distances = np.minimum(distances, np.linalg.norm(points - points[chosen[-1]], axis=1))
        distances[~allowed] = distances[chosen] = -1.0
        chosen.append(int(distances.argmax()))
    return chosen
