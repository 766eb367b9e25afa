"""Fit the constants of a machine to measured steps, so that predictions of others come closer. No jax.

Only the five constants of the cost model are fitted, on steps that were run for it. Next: `machine.py`,
`trainer/planned.py`, which runs them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from shardtrain.plan.machine import Link, Machine
from shardtrain.plan.prediction import Prediction

Predict = Callable[[Machine], Sequence[float]]
"""Machine -> seconds of each step that was measured."""

PRIOR = 0.1
"""Weight of the constants that were there before: to be a factor of e away from one costs as much as to
predict a step 10 % wrong."""

LEAST = 1e-12
"""Seconds, for constants and parts of a step that are 0 and have no logarithm."""

SLOWEST = 4.0
"""A step that is predicted to be so many times slower than the fastest is no probe: nobody would take it."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A machine whose constants were fitted.

    Args:
      machine: with these constants.
      before: of each step, predicted over measured seconds before the fit.
      after: the same after it.
      left_out: the same of a machine that was fitted to the other steps alone.
    """

    machine: Machine
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...]


def fit_rates(start: Machine, predict: Predict, measured: Sequence[float]) -> Fitted:
    """Fit rates, kernel time, link and latency by least squares of the logarithms of seconds.

    Args:
      start: the constants to start from, which are kept where the steps say nothing of them; all devices are
        taken to have one kind of link.
      predict: of the steps.
      measured: seconds of the steps.

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
    return Fitted(
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


def spread(predicted: Sequence[Prediction], number: int) -> list[int]:
    """Choose steps that differ as much as can be in what their time is spent on.

    The first is the one that is predicted to be the fastest; each further one is the farthest from those
    before, by the logarithms of its seconds of computation, collectives, update and waiting.

    Args:
      predicted: the steps to choose from.
      number: how many to choose.

    Returns:
      Positions in `predicted`, at most `number`.
    """
    totals = np.array([each.seconds.total for each in predicted])
    parts = np.array(
        [
            (s.compute, sum(s.collectives.values()), s.update, s.bubble)
            for s in (each.seconds for each in predicted)
        ]
    )
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
