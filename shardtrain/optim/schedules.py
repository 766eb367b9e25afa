"""Learning-rate schedules by name: options, registry, and the optax schedule of a run.

A new one is a function and a line in `SCHEDULES`. Next: `optimizer.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax.numpy as jnp
import optax

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate over the steps of a run.

    Args:
      name: constant; cosine (Loshchilov and Hutter 2017); wsd: warmup, stable, decay (Hu et al.
        2024, MiniCPM); inverse_sqrt: after the warmup falls as 1/sqrt(step) (Vaswani et al. 2017).
      peak: the highest learning rate.
      warmup: steps of linear rise from `start`.
      start: where the warmup begins, as a share of the peak; 1 / N is the gradual warmup of Goyal et
        al. 2017 (section 2.2) for a rate that was raised N times.
      final: what is left at the end, as a share of the peak (cosine, wsd).
      decay: wsd only: the share of the run's steps in which it falls.
      function: step -> learning rate, such as any schedule of optax; it takes the place of all fields above.

    Short forms: a number is a constant rate, a function is `function`.

    Raises:
      ValueError: lists every value of a wrong kind or out of range.
    """

    name: Literal["constant", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    peak: float = 1e-3
    warmup: int = 0
    start: float = 0.0
    final: float = 0.1
    decay: float = 0.2
    function: Callable[[Any], Any] | None = None

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """The fields that a bare value stands for; None: it is no short form."""
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return {"name": "constant", "peak": value}
        return {"function": value} if callable(value) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.function is not None:
            problems += [
                f"{field.name} is {value!r}, but the rate is given as a function, which says everything;"
                f" leave {field.name} out, or function"
                for field in fields(self)
                if field.name != "function" and (value := getattr(self, field.name)) != field.default
            ]
        if not self.peak > 0:
            problems.append(f"peak is {self.peak}; it must be a number above 0")
        if self.warmup < 0:
            problems.append(f"warmup is {self.warmup} steps; it must be 0 or more")
        problems += [
            f"{name} is {value}; it must lie between 0 and 1"
            for name, value in (("start", self.start), ("final", self.final), ("decay", self.decay))
            if not 0 <= value <= 1
        ]
        if problems:
            raise problems_error("this schedule cannot be used", problems)


def _constant(schedule: Schedule, steps: int) -> optax.Schedule:
    return optax.constant_schedule(schedule.peak)


def _cosine(schedule: Schedule, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(schedule.peak, max(steps, 1), alpha=schedule.final)


def _wsd(schedule: Schedule, steps: int) -> optax.Schedule:
    falling = min(max(round(schedule.decay * (steps + schedule.warmup)), 1), max(steps, 1))
    decay = optax.linear_schedule(schedule.peak, schedule.peak * schedule.final, falling)
    return optax.join_schedules([optax.constant_schedule(schedule.peak), decay], [max(steps - falling, 0)])


def _inverse_sqrt(schedule: Schedule, steps: int) -> optax.Schedule:
    start = max(schedule.warmup, 1)
    # join_schedules asks for steps before its beginning too
    return lambda step: schedule.peak * (start / (jnp.maximum(step, 0) + start)) ** 0.5


SCHEDULES: dict[str, Callable[[Schedule, int], optax.Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}


def make_schedule(schedule: Schedule, steps: int) -> optax.Schedule:
    """step -> learning rate, for a run of `steps` steps.

    >>> rate = make_schedule(Schedule(name="cosine", peak=1.0, warmup=10, final=0.0), 110)
    >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if schedule.function is not None:
        return schedule.function
    after_warmup = SCHEDULES[schedule.name](schedule, max(steps - schedule.warmup, 0))
    if not schedule.warmup:
        return after_warmup
    rise = optax.linear_schedule(schedule.peak * schedule.start, schedule.peak, schedule.warmup)
    return optax.join_schedules([rise, after_warmup], [schedule.warmup])
