"""What a plan says beyond its best way: devices for an efficiency, links to hide transfers, remat by memory.

It asks the planner's search and predictions, and computes nothing of them again.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.advice.efficiency import most_devices
from shardtrain.plan.islands import KindPlan
from shardtrain.plan.search import Ranked, search
from shardtrain.plan.space import REMATS, Space
from shardtrain.plan.steps import steps
from shardtrain.plan.subject import Subject


class Scaling(NamedTuple):
    """How the best way would scale.

    Args:
      overhead_ratio: seconds that more devices do not shorten (bubble, collectives, update) over seconds of
        computation on one device; taken as constant.
      efficiency: of the devices that were planned.
      most_devices: the largest number of devices for the wanted efficiency.
      link_factor: how many times as fast links would have to be to hide collectives behind computation, with
        latencies as they are; inf: these alone are longer than it.
    """

    overhead_ratio: float
    efficiency: float
    most_devices: float
    link_factor: float


def scaling(subject: Subject, each: KindPlan, best: Ranked, efficiency: float) -> Scaling:
    """Return how the best way of a plan would scale (Zou et al. 2017).

    Args:
      subject: what was planned, with the rows of this kind of islands.
      each: the plan of the kind.
      best: the way.
      efficiency: that is wanted.
    """
    seconds, num_devices = best.prediction.seconds, each.kind.devices or 1
    latency = _latency_seconds(subject, each, best)
    sent, left = sum(seconds.collectives.values()) - latency, seconds.compute - latency
    overhead = seconds.total - seconds.compute
    ratio = overhead / (seconds.compute * num_devices)
    return Scaling(
        overhead_ratio=ratio,
        efficiency=(1 + ratio) / (1 + ratio * num_devices),
        most_devices=most_devices(ratio, efficiency),
        link_factor=sent / left if left > 0 else math.inf,
    )


def _latency_seconds(subject: Subject, each: KindPlan, best: Ranked) -> float:
    """Return the part of the seconds of collectives that faster links do not shorten."""
    (step,) = steps(subject, each.machine, each.kind.devices or 1, [best.choice])
    times = step.times(each.machine)
    found = sum(one.latency_seconds for one in times.collectives)
    # what is left is sent between the stages of a pipeline, each time with the same part of latency
    all_seconds = sum(best.prediction.seconds.collectives.values())
    between = all_seconds - sum(one.seconds for one in times.collectives)
    link = each.machine.link((axes.PIPELINE,), step.sizes)
    return found + (between * link.latency_seconds / times.hop if times.num_stages > 1 and times.hop else 0.0)


def by_remat(subject: Subject, each: KindPlan, best: Ranked) -> list[Ranked]:
    """Return the best number of microbatches for each way to recompute, on the mesh of a plan's best way.

    Args:
      subject: what was planned, with the rows of this kind of islands.
      each: the plan of the kind.
      best: the way whose layout and schedule are kept.

    Returns:
      The fastest that fits of each recomputation that the model has, from the least to the most; the
      smallest where none fits.
    """
    remats = REMATS if best.choice.remat is not None else (None,)
    layout, found = best.choice.layout, []
    for remat in remats:
        space = Space(layout=layout, remats=(remat,), schedules=(best.choice.schedule,))
        try:
            ranked = search(subject, each.machine, each.kind.devices or 1, space, 1000).ranked
        except ValueError:
            # the model cannot recompute like that
            continue
        found += [one for one in ranked if _same_layout(one, best)][:1]
    return found


def _same_layout(one: Ranked, other: Ranked) -> bool:
    first, second = (replace(each.choice.layout, mesh={}) for each in (one, other))
    return first == second
