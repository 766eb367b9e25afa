"""Options of a learning-rate schedule, the registry of schedules, and the optax schedule of a run.

A new one is a function and a line in `SCHEDULES`. Next: `optimizer.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error, refuse
from shardtrain.functional.model import path_text
from shardtrain.system.excerpts import some


def find_rate_problem(text: str) -> str | None:
    """Return what is wrong with a PATTERN=FACTOR of learning rates; None if nothing is.

    >>> find_rate_problem("blocks/*=0.5") is None
    True
    >>> find_rate_problem("blocks/*=-1")
    "rates has 'blocks/*=-1'; write PATTERN=FACTOR with a factor of 0 or more, as in 'blocks/*=0.1'"
    """
    pattern, found, factor = text.rpartition("=")
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if pattern and found and math.isfinite(value) and value >= 0:
        return None
    return f"rates has {text!r}; write PATTERN=FACTOR with a factor of 0 or more, as in 'blocks/*=0.1'"


def check_rates(rates: Sequence[str], paths: Sequence[str]) -> None:
    """Check that every pattern is the first to match some parameter of these paths.

    Raises:
      ValueError: lists every pattern that is not.
    """
    chosen = {_find_first(path, rates) for path in paths}
    if idle := [each for each in rates if each not in chosen]:
        raise problems_error(
            "rates does not fit the parameters that are trained",
            [f"{each!r} is the first to match no parameter; there are {some(paths, 20)}" for each in idle],
        )


def map_updates(
    update: optax.GradientTransformation, change: Callable[[str, jax.Array], jax.Array]
) -> optax.GradientTransformationExtraArgs:
    """Change the updates of a transformation by a function (path of a parameter, its update) -> update."""
    inner = optax.with_extra_args_support(update)

    def apply(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        found, state = inner.update(updates, state, params, **extra)
        return jax.tree.map_with_path(lambda path, x: change(path_text(path), x), found), state

    return optax.GradientTransformationExtraArgs(inner.init, apply)


def multiply_rates(
    update: optax.GradientTransformation, rates: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """Multiply the updates of a transformation by factors; its state is the same.

    Args:
      update: a transformation that includes the learning rate (and decay, which is scaled too).
      rates: "PATTERN=FACTOR"; the first whose pattern (fnmatch) matches the path of a parameter applies.

    >>> update = multiply_rates(optax.sgd(1.0), ["head=0", "h*=0.5"])
    >>> params = {"head": 1.0, "hidden": 1.0, "last": 1.0}
    >>> updates, _ = update.update(params, update.init(params))
    >>> {name: float(x) for name, x in updates.items()}
    {'head': -0.0, 'hidden': -0.5, 'last': -1.0}
    """

    def scale(path: str, x: jax.Array) -> jax.Array:
        found = _find_first(path, rates)
        return x if found is None else float(found.rpartition("=")[2]) * x

    return map_updates(update, scale)


def _find_first(path: str, rates: Sequence[str]) -> str | None:
    return next((each for each in rates if fnmatchcase(path, each.rpartition("=")[0])), None)


# Each function gives the rate after the warmup; `make_schedule` puts the warmup before it.


def _constant(schedule: "Schedule", steps: int) -> optax.Schedule:
    return optax.constant_schedule(schedule.peak)


def _cosine(schedule: "Schedule", steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(schedule.peak, max(steps, 1), alpha=schedule.final)


def _wsd(schedule: "Schedule", steps: int) -> optax.Schedule:
    # the decay is a fraction of the whole run, warmup included
    falling = min(max(round(schedule.decay * (steps + schedule.warmup)), 1), max(steps, 1))
    decay = optax.linear_schedule(schedule.peak, schedule.peak * schedule.final, falling)
    return optax.join_schedules([optax.constant_schedule(schedule.peak), decay], [max(steps - falling, 0)])


def _inverse_sqrt(schedule: "Schedule", steps: int) -> optax.Schedule:
    start = max(schedule.warmup, 1)
    # join_schedules evaluates it before its first step too
    return lambda step: schedule.peak * (start / (jnp.maximum(step, 0) + start)) ** 0.5


def _polynomial(schedule: "Schedule", steps: int) -> optax.Schedule:
    final = schedule.peak * schedule.final
    return optax.polynomial_schedule(schedule.peak, final, schedule.power, max(steps, 1))


SCHEDULES: dict[str, Callable[["Schedule", int], optax.Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "polynomial": _polynomial,
}
"""Name -> (options, number of steps after the warmup) -> the learning rate over those steps, which start at
0."""

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Options of a learning-rate schedule.

    Args:
      name: constant; cosine: cosine decay (Loshchilov and Hutter 2017); wsd: warmup, stable, decay
        (Hu et al. 2024, MiniCPM); inverse_sqrt: decays as 1/sqrt(step) (Vaswani et al. 2017); polynomial:
        decays as a power of the remaining fraction of the run (Chen et al. 2017, DeepLab, section 4.1).
      peak: the highest learning rate.
      warmup: number of steps of linear rise from `start` times the peak to the peak.
      start: learning rate of the first warmup step, as a fraction of the peak; 1 / N is the gradual warmup of
        Goyal et al. 2017 (section 2.2) for a rate that was scaled by N.
      final: learning rate of the last step, as a fraction of the peak (cosine, wsd, polynomial).
      decay: fraction of the run's steps over which the rate decays (wsd).
      power: exponent of the decay: 1 is linear, above 1 the rate falls fast at first (polynomial).
      function: step -> learning rate, such as any optax schedule; it replaces all other fields.

    Short forms: a number is a constant rate, a function is `function`.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    name: ScheduleName = "cosine"
    peak: float = 1e-3
    warmup: int = 0
    start: float = 0.0
    final: float = 0.1
    decay: float = 0.2
    power: float = 1.0
    function: Callable[[Any], Any] | None = None

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """Return the fields that a short form sets; None if the value is not a short form."""
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return {"name": "constant", "peak": value}
        return {"function": value} if callable(value) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.function is not None:
            problems += [
                f"{field.name} is {value!r}, but the rate is given as a function, which is the whole"
                f" schedule; leave {field.name} out, or function"
                for field in fields(self)
                if field.name != "function" and (value := getattr(self, field.name)) != field.default
            ]
        if not self.peak > 0:
            problems.append(f"peak is {self.peak}; it must be a number above 0")
        if not self.power > 0:
            problems.append(f"power is {self.power}; it must be a number above 0, such as 1 (linear) or 2")
        if self.warmup < 0:
            problems.append(f"warmup is {self.warmup} steps; it must be 0 or more")
        problems += [
            f"{name} is {value}; it must lie between 0 and 1"
            for name, value in (("start", self.start), ("final", self.final), ("decay", self.decay))
            if not 0 <= value <= 1
        ]
        refuse("this schedule cannot be used", problems)


def make_schedule(schedule: Schedule, steps: int) -> optax.Schedule:
    """Return the optax schedule (step -> learning rate) of a run of `steps` steps.

    >>> rate = make_schedule(Schedule(name="cosine", peak=1.0, warmup=10, final=0.0), 110)
    >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> rate = make_schedule(Schedule(name="polynomial", peak=1.0, power=2, final=0.2), 100)
    >>> [round(float(rate(step)), 3) for step in (0, 50, 100)]
    [1.0, 0.4, 0.2]
    """
    if schedule.function is not None:
        return schedule.function
    after_warmup = SCHEDULES[schedule.name](schedule, max(steps - schedule.warmup, 0))
    if not schedule.warmup:
        return after_warmup
    rise = optax.linear_schedule(schedule.peak * schedule.start, schedule.peak, schedule.warmup)
    return optax.join_schedules([rise, after_warmup], [schedule.warmup])
