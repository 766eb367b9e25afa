"""Search the layouts of a number of devices, and rank them by predicted step time and memory.

The checks of a run accept or refuse each combination of axis sizes, ZeRO stage, microbatches, schedule and
remat policy; `predict.py` predicts it.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.prediction import Choice, OperatorChange, Prediction
from shardtrain.plan.space import Space, count_mixed_blocks, list_allowed_choices, list_allowed_remats
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import MOST_DEVICES, divisors


@dataclass(frozen=True, kw_only=True)
class RankedChoice:
    """A choice that a run accepts, with its prediction.

    Args:
      choice: the choice.
      prediction: its prediction.
      fits: whether it fits the memory of a device.
      change: what operators with shardings of their own change; None if it has none.
    """

    choice: Choice
    prediction: Prediction
    fits: bool
    change: OperatorChange | None = None

    @property
    def is_pipeline(self) -> bool:
        """Whether the mesh has several stages."""
        return self.choice.layout.mesh.get(axes.PIPELINE, 1) > 1

    @property
    def order(self) -> tuple[bool, float]:
        """What choices are sorted by: the fastest that fit first, then the smallest of the others."""
        needed = self.prediction
        return not self.fits, needed.seconds.total if self.fits else needed.memory.total


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search.

    Args:
      ranked: choices that fit, the fastest first; then all others, the smallest first.
      refused: mesh -> why the checks of a run refuse it.
      num_choices: number of compared choices, without their remat policies.
      nearest: if nothing runs, a batch or a number of devices that would run.
    """

    ranked: tuple[RankedChoice, ...]
    refused: Mapping[str, str]
    num_choices: int
    nearest: str = ""


def search(
    subject: Subject, machine: Machine, num_devices: int, space: Space | None = None, most: int = 20
) -> Plan:
    """Rank the choices for a step on equal devices.

    For each mesh, number of microbatches and schedule, the remat policy is the one that recomputes the least
    and fits; if none fits, the one that needs the least memory. If not all blocks can keep everything, and
    recomputing the fewest that fit is faster, they have two policies, outside pipelines.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: number of devices.
      space: the choices to search. None means all.
      most: number of the best choices to return.
    """
    space = space or Space()
    if not 1 <= num_devices <= MOST_DEVICES:
        raise ValueError(f"a plan of {num_devices} devices was asked for; use 1 to {MOST_DEVICES}")
    choices, refused = list_allowed_choices(subject, num_devices, space)
    remats = list_allowed_remats(subject, space)
    pairs = _select_least_recomputed(subject, machine, num_devices, choices, remats)
    num_blocks = count_mixed_blocks(subject, space)
    bounds = [_Bound(best.order, best) for _, best in pairs]
    bounds = _estimate_mixes(subject, machine, num_devices, pairs) if num_blocks else bounds
    ranked: list[RankedChoice] = []
    # pipelines are simulated, and mixes of policies traced, only if they may be among the best
    for bound in sorted(bounds, key=lambda each: each.order):
        if len(ranked) >= most and bound.order > ranked[most - 1].order:
            break
        found = bound.best
        if bound.ends:
            found = _mix_remats(subject, machine, num_devices, bound, num_blocks)
        insort(ranked, _simulate(found, subject, machine, num_devices), key=lambda each: each.order)
    return Plan(ranked=tuple(ranked[:most]), refused=refused, num_choices=len(choices))


class _Bound(NamedTuple):
    """A choice with one remat policy, what it is sorted by, and the ends of a mix that may be faster.

    Args:
      order: see `RankedChoice.order`; of a mix an estimate.
      best: the choice.
      ends: predictions without recomputation, which does not fit, and with all of it, which does.
    """

    order: tuple[bool, float]
    best: RankedChoice
    ends: tuple[RankedChoice, RankedChoice] | None = None


def _find_part(large: RankedChoice, small: RankedChoice, machine: Machine) -> float:
    """Return how far from one to the other memory is enough, as it falls about in line with blocks."""
    most, least = large.prediction.memory.total, small.prediction.memory.total
    return (most - machine.rates.memory_bytes) / (most - least)


def _estimate_mixes(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    pairs: Sequence[tuple[RankedChoice, RankedChoice]],
) -> list[_Bound]:
    """Find the choices for which two policies, all and nothing recomputed, seem to be faster than one."""
    # a pipeline is planned for blocks that are alike
    mixed = [best.fits > first.fits and not best.is_pipeline for first, best in pairs]
    choices = [replace(best.choice, remat="full") for _, best in compress(pairs, mixed)]
    all_full = iter(_bound_choices(subject, machine, num_devices, choices))
    found = []
    for (first, best), may_mix in zip(pairs, mixed, strict=True):
        bound = _Bound(best.order, best)
        if may_mix and (full := next(all_full)).fits:
            none, whole = (each.prediction.seconds.total for each in (first, full))
            order = (False, none + _find_part(first, full, machine) * (whole - none))
            bound = _Bound(order, best, (first, full)) if order < best.order else bound
        found.append(bound)
    return found


def _mix_remats(
    subject: Subject, machine: Machine, num_devices: int, bound: _Bound, num_blocks: int
) -> RankedChoice:
    """Recompute the fewest blocks that fit, the others not at all; return one policy if that is faster."""
    assert bound.ends is not None
    (large, small), few, many = bound.ends, 0, num_blocks
    while many - few > 1:
        number = few + math.ceil(_find_part(large, small, machine) * (many - few))
        number = min(max(number, few + 1), many - 1)
        choice = replace(bound.best.choice, remat=f"full={number},none={num_blocks - number}")
        (one,) = _bound_choices(subject, machine, num_devices, [choice])
        few, large, many, small = (few, large, number, one) if one.fits else (number, one, many, small)
    return min(bound.best, small, key=lambda each: each.order)


def _simulate(bound: RankedChoice, subject: Subject, machine: Machine, num_devices: int) -> RankedChoice:
    """Predict a pipeline again, with the time that its stages wait."""
    if not bound.is_pipeline:
        return bound
    (exact,) = predict_choices(subject, machine, num_devices, [bound.choice])
    return replace(bound, prediction=exact)


def _bound_choices(
    subject: Subject, machine: Machine, num_devices: int, choices: Sequence[Choice]
) -> list[RankedChoice]:
    """Predict choices, without the time that the stages of pipelines wait."""
    found = predict_choices(subject, machine, num_devices, choices, waits=False)
    most = machine.rates.memory_bytes
    return [
        RankedChoice(choice=choice, prediction=each, fits=each.memory.total <= most)
        for choice, each in zip(choices, found, strict=True)
    ]


def _select_least_recomputed(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    choices: Sequence[Choice],
    remats: Sequence[str | None],
) -> list[tuple[RankedChoice, RankedChoice]]:
    """Return each choice with the first remat policy, and with the first that fits or the smallest."""
    best: dict[int, tuple[RankedChoice, RankedChoice]] = {}
    for remat in remats:
        open_numbers = [i for i in range(len(choices)) if i not in best or not best[i][1].fits]
        tried = [replace(choices[i], remat=remat) for i in open_numbers]
        for i, one in zip(open_numbers, _bound_choices(subject, machine, num_devices, tried), strict=True):
            first, smallest = best.get(i, (one, one))
            best[i] = first, min(smallest, one, key=lambda each: each.order)
    return list(best.values())


def find_frontier(
    subject: Subject, machine: Machine, num_devices: int, space: Space
) -> tuple[tuple[RankedChoice, ...], tuple[tuple[float, float], ...]]:
    """Return the choices that need less memory than every faster one, and the points of all choices.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: number of devices.
      space: the choices to compare, with all their remat policies.

    Returns:
      The frontier, the smallest choice first; and (bytes, seconds) of each choice without a pipeline, as
      pipelines are simulated only if they may be on the frontier.
    """
    choices, _ = list_allowed_choices(subject, num_devices, space)
    remats = list_allowed_remats(subject, space)
    tried = [replace(choice, remat=remat) for remat in remats for choice in choices]
    found = _bound_choices(subject, machine, num_devices, tried)
    points = tuple(_locate(each) for each in found if not each.is_pipeline)
    best: list[RankedChoice] = []
    for each in sorted(found, key=_locate):
        # seconds without waiting are a lower bound
        if best and each.prediction.seconds.total >= best[-1].prediction.seconds.total:
            continue
        exact = _simulate(each, subject, machine, num_devices)
        if not best or exact.prediction.seconds.total < best[-1].prediction.seconds.total:
            best.append(exact)
    return tuple(best), points


def _locate(each: RankedChoice) -> tuple[float, float]:
    return each.prediction.memory.total, each.prediction.seconds.total


Find = Callable[[Subject, Machine, int, Space], RankedChoice | None]
"""Subject, machine, number of devices and space -> the choice; None if it cannot run."""


def data_parallel(subject: Subject, machine: Machine, devices: int, space: Space) -> RankedChoice | None:
    """Return the fastest choice with a copy of the model on each device."""
    return _fix(subject, machine, devices, space, {axes.DATA: devices})


def megatron(subject: Subject, machine: Machine, devices: int, space: Space) -> RankedChoice | None:
    """Return the choice of Megatron's rules: a copy of the model on the smallest number of devices that fits.

    These devices are tensor parallel inside a node and a pipeline across nodes; copies are data parallel
    (Narayanan et al. 2021, SC, sections 3.2 and 3.3, takeaways 1 and 2). If nothing fits, it is the choice
    that needs the least memory.
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
"""Name -> the function that finds the choice."""


def plan_named_layouts(
    subject: Subject, machine: Machine, devices: int, space: Space
) -> dict[str, RankedChoice | None]:
    """Return the choice of each of `NAMED`.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      devices: number of devices.
      space: the choices to search; the name sets the sizes of axes.
    """
    return {name: find(subject, machine, devices, space) for name, find in NAMED.items()}


def _fix(
    subject: Subject, machine: Machine, devices: int, space: Space, mesh: Mapping[str, int]
) -> RankedChoice | None:
    sizes = {axis: mesh.get(axis, 1) for axis in (axes.PIPELINE, axes.DATA, axes.FSDP, axes.TENSOR)}
    fixed = replace(space, layout=replace(space.layout, mesh=sizes))
    return next(iter(search(subject, machine, devices, fixed, 1).ranked), None)
