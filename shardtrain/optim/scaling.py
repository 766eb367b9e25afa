"""Scale a run written for one replica to N replicas: learning rate, warmup, batch and steps.

Next: `schedules.py`, the learning-rate schedules.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule

RATES: dict[str, Callable[[int], float]] = {"none": lambda n: 1.0, "linear": float, "sqrt": math.sqrt}
"""Rule -> number of replicas -> factor of the learning rate."""

GOYAL_WARMUP = 5 / 90
"""Warmup of Goyal et al. 2017 as a fraction of the run: 5 of 90 epochs."""

ADASUM_MOST = 2.5
"""Horovod's Adasum guide: 2 to 2.5 times the best rate of one replica may help, and no more."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Changes to a run that is written for one replica when N replicas execute it.

    Args:
      rate: how the learning rate grows. none: it does not; linear: times N (Goyal et al. 2017, section 2.1,
        for SGD); sqrt: times the square root of N (Krizhevsky 2014; for Adam Malladi et al. 2022).
      batch: whether to multiply the batch by N, the number of replicas, so that each has the run's batch.
      steps: whether to divide the steps, and the warmup of the schedule, by N, the number of replicas; at
        least 1 step is left.
      warmup: steps in which the rate rises linearly from the rate of one replica to the scaled one (Goyal et
        al. 2017, section 2.2); None keeps the warmup of the schedule.

    Raises:
      ValueError: lists every value of a wrong kind or out of range.
    """

    rate: Literal["none", "linear", "sqrt"] = "none"
    batch: bool = False
    steps: bool = False
    warmup: int | None = None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.warmup is not None and self.warmup < 0:
            problems.append(f"warmup is {self.warmup} steps; use 0 or more, or None")
        elif self.warmup and self.rate == "none":
            problems.append(
                f"warmup is {self.warmup} steps, but with rate 'none' there is nothing to rise to; use"
                f" rate linear or sqrt, or set optimizer.learning_rate.warmup to {self.warmup}"
            )
        refuse("this scaling cannot be used", problems)


def scale_run(
    run: Any, scaling: Scaling, replicas: int, combiner: str = "mean", replicas_averaged: int = 1
) -> tuple[Any, tuple[str, ...]]:
    """Return the run that N replicas execute, and notes for the user on changes and doubtful combinations.

    One replica, or the default scaling, changes nothing. Intervals of logging, evaluation and saving stay the
    same.

    Args:
      run: a `config.Run`, or any frozen dataclass with its fields optimizer, batch and steps.
      scaling: what to change.
      replicas: N, number of gradients that a step combines.
      combiner: name of the combiner of these gradients, such as "mean", "adasum" or "int8+adasum:whole".
      replicas_averaged: number of replicas that are averaged before Adasum (inside an island).

    Raises:
      ValueError: the rate is to be scaled, but the optimizer is a bare optax transformation.

    Source: Goyal et al. 2017, Accurate, Large Minibatch SGD; Horovod's guides (rate times N, steps
    divided by N; adasum_user_guide.rst); Dong et al. 2019, Scaling Distributed Training of
    Flood-Filling Networks (arXiv 1905.06236: both rules, with warmup, on up to 2,048 KNL nodes).

    >>> @dataclass(frozen=True)
    ... class Run:
    ...     optimizer: Optimizer = Optimizer(name="sgd", learning_rate=Schedule(peak=0.1))
    ...     batch: int = 32
    ...     steps: int = 1000
    >>> run, notes = scale_run(Run(), Scaling(rate="linear", batch=True, steps=True, warmup=10), 8)
    >>> notes[0]
    'scaled to 8 replicas: batch 32 -> 256, steps 1000 -> 125, peak rate 0.1 -> 0.8 (linear), warmup 0 -> 10 \
steps from 0.1'
    """
    if replicas < 1:
        raise ValueError(f"a run is to be scaled to {replicas} replicas; use 1 or more")
    if replicas == 1 or scaling == Scaling():
        return run, ()
    steps = max(run.steps // replicas, 1) if scaling.steps else run.steps
    batch = run.batch * replicas if scaling.batch else run.batch
    optimizer = _scale_optimizer(run.optimizer, scaling, replicas)
    result = dataclasses.replace(run, optimizer=optimizer, batch=batch, steps=steps)
    return result, (
        _format_summary(run, result, scaling, replicas),
        *_list_budget_notes(run, scaling, replicas),
        *_list_rate_notes(result, scaling, replicas, combiner),
        *_list_combiner_notes(run, scaling, replicas, combiner, replicas_averaged),
    )


def _scale_optimizer(optimizer: Any, scaling: Scaling, replicas: int) -> Any:
    factor = RATES[scaling.rate](replicas)
    if not isinstance(optimizer, Optimizer):
        return _make_unscaled(optimizer, "the optimizer", scaling, replicas)
    schedule = optimizer.learning_rate
    if schedule.function is not None:
        return _make_unscaled(optimizer, "its learning rate", scaling, replicas)
    warmup, start = schedule.warmup, schedule.start
    if scaling.steps:
        warmup = -(-warmup // replicas)
    if scaling.warmup is not None:
        warmup, start = scaling.warmup, 1 / factor
    schedule = dataclasses.replace(schedule, peak=schedule.peak * factor, warmup=warmup, start=start)
    return dataclasses.replace(optimizer, learning_rate=schedule)


def _make_unscaled(optimizer: Any, what: str, scaling: Scaling, replicas: int) -> Any:
    """Return an optimizer given in Python as it is; raise an error if its rate is to be scaled."""
    if scaling.rate == "none":
        return optimizer
    factor = RATES[scaling.rate](replicas)
    raise ValueError(
        f"the learning rate is to be scaled ({scaling.rate}) by {factor:.4g} for {replicas} replicas, but"
        f" {what} is given in Python ({type(optimizer).__name__}), and its rate cannot be changed"
        f" from outside; use an Optimizer(name=..., learning_rate=Schedule(...)), or multiply its rate by"
        f" {factor:.4g} yourself and use rate none"
    )


def _format_summary(run: Any, result: Any, scaling: Scaling, replicas: int) -> str:
    """Format what changed as one line."""
    parts = [
        f"{name} {before} -> {after}"
        for name, before, after in (
            ("batch", run.batch, result.batch),
            ("steps", run.steps, result.steps),
        )
        if before != after
    ]
    before, after = _find_schedule(run), _find_schedule(result)
    if before is not None and after is not None:
        if before.peak != after.peak:
            parts.append(f"peak rate {before.peak:.4g} -> {after.peak:.4g} ({scaling.rate})")
        if before.warmup != after.warmup or before.start != after.start:
            rise = f" from {after.peak * after.start:.4g}" if after.warmup else ""
            parts.append(f"warmup {before.warmup} -> {after.warmup} steps{rise}")
    return f"scaled to {replicas} replicas: {', '.join(parts) or 'nothing to change'}"


def _find_schedule(run: Any) -> Schedule | None:
    """Return the schedule of the run's optimizer, None if it is given in Python."""
    schedule = run.optimizer.learning_rate if isinstance(run.optimizer, Optimizer) else None
    return None if schedule is None or schedule.function is not None else schedule


def _list_budget_notes(run: Any, scaling: Scaling, replicas: int) -> list[str]:
    """Note settings of batch, steps and rate that do not fit each other."""
    notes = []
    if scaling.steps and not scaling.batch:
        notes.append(
            f"steps are divided by {replicas}, but {replicas} replicas share a batch of {run.batch}: the run"
            f" reads 1/{replicas} of the examples; scaling.batch reads as many as one replica would"
        )
    if scaling.rate != "none" and not scaling.batch:
        notes.append(
            f"the rate is raised ({scaling.rate}), but the batch of {run.batch} is not: the {scaling.rate}"
            f" rule is for {run.batch * replicas} examples in a step; use scaling.batch, or rate none"
        )
    if scaling.steps and _find_schedule(run) is None:
        notes.append(
            "steps are divided, but a schedule inside the optimizer, which is given in Python, is not:"
            f" let it end after {max(run.steps // replicas, 1)} steps"
        )
    return notes


def _list_rate_notes(result: Any, scaling: Scaling, replicas: int, combiner: str) -> list[str]:
    """Note doubtful uses of the linear rule, and a warmup that is too long."""
    schedule, notes = _find_schedule(result), []
    if schedule is None:
        return []
    if scaling.rate == "linear" and not schedule.warmup:
        rise = max(round(result.steps * GOYAL_WARMUP), 1)
        notes.append(
            f"the rate is {replicas} times that of one replica from the first step on; Goyal et al. let it"
            f" rise over 5 of 90 epochs: scaling.warmup={rise}"
        )
    name = result.optimizer.name
    if scaling.rate == "linear" and name != "sgd" and _find_kind(combiner) == "mean":
        root = schedule.peak / math.sqrt(replicas)
        notes.append(
            f"the linear rule is that of SGD; for {name} theory has the square root (Malladi et al. 2022),"
            " and with Adam Dong et al. 2019 found it the better one beyond 16 replicas: rate sqrt gives a"
            f" peak of {root:.4g}"
        )
    if schedule.warmup >= result.steps:
        notes.append(
            f"the warmup of {schedule.warmup} steps is as long as the run of {result.steps}: the rate never"
            f" falls; a warmup of {max(round(result.steps * GOYAL_WARMUP), 1)} leaves room"
        )
    return notes


def _find_kind(combiner: str) -> str:
    """Return the name of a combiner without its codecs and options."""
    return combiner.split("+")[-1].partition(":")[0]


def _list_combiner_notes(
    run: Any, scaling: Scaling, replicas: int, combiner: str, averaged: int
) -> list[str]:
    """Note rates that do not fit a combiner which scales the step itself."""
    kind = _find_kind(combiner)
    factor = RATES[scaling.rate](replicas)
    schedule = _find_schedule(run)
    if kind == "sum" and factor != 1:
        return [
            f"the sum of {replicas} gradients is already {replicas} times their mean; with SGD, rate"
            f" {scaling.rate} makes it {replicas * factor:.4g} times: use rate none, or the combiner mean"
        ]
    if kind != "adasum" or schedule is None or averaged <= factor <= ADASUM_MOST * averaged:
        return []
    rule = f"Horovod's guide takes the best rate of one replica times {averaged}"
    if averaged > 1:
        rule += " (the replicas that are averaged before Adasum)"
    if factor < averaged:
        return [f"{rule}; the rate is scaled by {factor:.4g}: try a peak of {schedule.peak * averaged:.4g}"]
    return [
        f"Adasum needs no scaled rate: {rule}, at most {ADASUM_MOST * averaged:.4g} times it; rate"
        f" {scaling.rate} makes it {factor:.4g} times: use rate none and a peak of"
        f" {schedule.peak * averaged:.4g}"
    ]
