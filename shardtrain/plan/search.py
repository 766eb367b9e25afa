"""Search the layouts of a number of devices: which fit the model and the memory, and how fast each is.

Every combination of axis sizes, ZeRO stage, microbatches, schedule and recomputation is judged by the checks
that a run makes itself, and predicted by `predict.py`.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.predict import predictions
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.space import Space, list_allowed_choices, list_allowed_remats
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import MOST_DEVICES, divisors


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A choice that a run would accept.

    Args:
      choice: the choice.
      prediction: what it needs.
      fits: whether its memory is within that of a device.
    """

    choice: Choice
    prediction: Prediction
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search.

    Args:
      ranked: those that fit, the fastest first; then the others, the smallest first.
      refused: mesh -> why the run's own checks refuse it.
      num_choices: how many choices were compared, recomputations not counted.
      nearest: where nothing runs, a batch or a number of devices that would.
    """

    ranked: tuple[Ranked, ...]
    refused: Mapping[str, str]
    num_choices: int
    nearest: str = ""


def search(
    subject: Subject, machine: Machine, num_devices: int, space: Space | None = None, most: int = 20
) -> Plan:
    """Rank the ways to run a step on equal devices.

    Of each mesh, number of microbatches and schedule, that recomputation is taken which computes the least
    again and fits; if none fits, the one that needs the least memory.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      space: what may be chosen; None: everything.
      most: how many of the best to return.
    """
    space = space or Space()
    if not 1 <= num_devices <= MOST_DEVICES:
        raise ValueError(f"a plan of {num_devices} devices was asked for; use 1 to {MOST_DEVICES}")
    choices, refused = list_allowed_choices(subject, num_devices, space)
    remats = list_allowed_remats(subject, space)
    bounds = _select_least_recomputed(subject, machine, num_devices, choices, remats)
    ranked: list[Ranked] = []
    # what a pipeline waits is simulated for those alone that may be among the best
    for bound in sorted(bounds, key=_rank):
        if len(ranked) >= most and _rank(bound) > _rank(ranked[most - 1]):
            break
        if bound.choice.layout.mesh.get(axes.PIPELINE, 1) > 1:
            (exact,) = predictions(subject, machine, num_devices, [bound.choice])
            bound = replace(bound, prediction=exact)
        insort(ranked, bound, key=_rank)
    return Plan(ranked=tuple(ranked[:most]), refused=refused, num_choices=len(choices))


def _rank(each: Ranked) -> tuple[bool, float]:
    needed = each.prediction
    return not each.fits, needed.seconds.total if each.fits else needed.memory.total


def _select_least_recomputed(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    choices: Sequence[Choice],
    remats: Sequence[str | None],
) -> list[Ranked]:
    """Return each choice with the least recomputation that fits, or the smallest, and bounds of its time."""
    best: dict[int, Ranked] = {}
    for remat in remats:
        open_numbers = [i for i in range(len(choices)) if i not in best or not best[i].fits]
        tried = [replace(choices[i], remat=remat) for i in open_numbers]
        found = predictions(subject, machine, num_devices, tried, waits=False)
        for i, choice, prediction in zip(open_numbers, tried, found, strict=True):
            fits = prediction.memory.total <= machine.rates.memory_bytes
            one = Ranked(choice=choice, prediction=prediction, fits=fits)
            if i not in best or _rank(one) < _rank(best[i]):
                best[i] = one
    return list(best.values())


def frontier(
    subject: Subject, machine: Machine, num_devices: int, space: Space
) -> tuple[tuple[Ranked, ...], tuple[tuple[float, float], ...]]:
    """Return the ways that need less memory than every faster one, and all that were compared.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      space: what may be chosen; all its recomputations are compared.

    Returns:
      The frontier, the smallest first; and (bytes, seconds) of each way that was compared and is no pipeline:
      of those, what stages wait is simulated only where it decides.
    """
    choices, _ = list_allowed_choices(subject, num_devices, space)
    remats = list_allowed_remats(subject, space)
    tried = [replace(choice, remat=remat) for remat in remats for choice in choices]
    found = [
        Ranked(
            choice=choice,
            prediction=prediction,
            fits=prediction.memory.total <= machine.rates.memory_bytes,
        )
        for choice, prediction in zip(
            tried, predictions(subject, machine, num_devices, tried, waits=False), strict=True
        )
    ]
    points = tuple(
        (each.prediction.memory.total, each.prediction.seconds.total)
        for each in found
        if not _is_pipeline(each)
    )
    return tuple(_unbeaten(found, subject, machine, num_devices)), points


def _unbeaten(found: Sequence[Ranked], subject: Subject, machine: Machine, num_devices: int) -> list[Ranked]:
    """Return the ways that are faster than all that need as little memory."""
    best: list[Ranked] = []
    for each in sorted(found, key=lambda one: (one.prediction.memory.total, one.prediction.seconds.total)):
        # seconds without waiting are a lower bound
        if best and each.prediction.seconds.total >= best[-1].prediction.seconds.total:
            continue
        exact = each
        if _is_pipeline(each):
            (prediction,) = predictions(subject, machine, num_devices, [each.choice])
            exact = replace(each, prediction=prediction)
        if not best or exact.prediction.seconds.total < best[-1].prediction.seconds.total:
            best.append(exact)
    return best


def _is_pipeline(each: Ranked) -> bool:
    return each.choice.layout.mesh.get(axes.PIPELINE, 1) > 1


Find = Callable[[Subject, Machine, int, Space], Ranked | None]
"""Model, devices, their number and what may be chosen -> the layout; None: it cannot run."""


def data_parallel(subject: Subject, machine: Machine, devices: int, space: Space) -> Ranked | None:
    """Return the fastest way with a copy of the model on each device."""
    return _fix(subject, machine, devices, space, {axes.DATA: devices})


def megatron(subject: Subject, machine: Machine, devices: int, space: Space) -> Ranked | None:
    """Return the way of Megatron's rules: the smallest number of devices for a copy of the model that fits.

    These devices are tensor parallel inside a node, a pipeline across nodes; copies are data parallel
    (Narayanan et al. 2021, SC, sections 3.2 and 3.3, takeaways 1 and 2). If nothing fits, the one that needs
    the least memory.
    """
    smallest = None
    for model_size in divisors(devices):
        tensor = math.gcd(model_size, min(machine.devices_per_node, devices))
        pipeline = model_size // tensor
        mesh = {axes.PIPELINE: pipeline, axes.DATA: devices // model_size, axes.TENSOR: tensor}
        found = _fix(subject, machine, devices, space, mesh)
        if found is not None and found.fits:
            return found
        if found is not None and (
            smallest is None or found.prediction.memory.total < smallest.prediction.memory.total
        ):
            smallest = found
    return smallest


NAMED: Mapping[str, Find] = {"data parallel": data_parallel, "megatron": megatron}
"""Name -> the layout."""


def plan_named_layouts(
    subject: Subject, machine: Machine, devices: int, space: Space
) -> dict[str, Ranked | None]:
    """Return the layout of each name.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      devices: how many.
      space: what may be chosen; sizes of axes are those of the name.
    """
    return {name: find(subject, machine, devices, space) for name, find in NAMED.items()}


def _fix(
    subject: Subject, machine: Machine, devices: int, space: Space, mesh: Mapping[str, int]
) -> Ranked | None:
    sizes = {axis: mesh.get(axis, 1) for axis in (axes.PIPELINE, axes.DATA, axes.FSDP, axes.TENSOR)}
    fixed = replace(space, layout=replace(space.layout, mesh=sizes))
    return next(iter(search(subject, machine, devices, fixed, 1).ranked), None)
