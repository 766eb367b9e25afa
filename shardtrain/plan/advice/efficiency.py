"""Compute how a plan scales: the devices that an efficiency allows, and the links that hide collectives.

Source: Zou et al. 2017, "Distributed Training Large-Scale Deep Architectures", https://arxiv.org/abs/1709.06622
(its lemma on the number of GPUs).
"""

import math
from dataclasses import replace
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.islands import KindPlan
from shardtrain.plan.predict import steps
from shardtrain.plan.search import RankedChoice, search
from shardtrain.plan.space import REMATS, Space
from shardtrain.plan.step_times import compute_step_times


def compute_speedup(overhead_ratio: float, devices: int) -> float:
    """Return how much faster a step is on several devices than on one, which share only the computation.

    Args:
      overhead_ratio: R_O, seconds of overhead over seconds of computation on one device.
      devices: G.

    Returns:
      (1 + R_O) / (1 / G + R_O); G times the efficiency.

    >>> round(compute_speedup(0.1, 4), 3)
    3.143
    """
    return (1 + overhead_ratio) / (1 / devices + overhead_ratio)


def compute_most_devices(overhead_ratio: float, efficiency: float) -> float:
    """Return the largest number of devices with an efficiency: G <= (1 + (1 - a) / R_O) / a.

    Args:
      overhead_ratio: R_O, as in `compute_speedup`; assumed not to grow with the devices.
      efficiency: a.

    Returns:
      A whole number from 1; inf without overhead.

    >>> compute_most_devices(0.1, 0.8), compute_most_devices(0.0, 0.8)
    (3, inf)
    """
    if overhead_ratio == 0:
        return math.inf
    # rounding may make a whole result smaller
    return max(math.floor((1 + (1 - efficiency) / overhead_ratio) / efficiency + 1e-9), 1)


class Scaling(NamedTuple):
    """How a choice scales.

    Args:
      overhead_ratio: seconds that more devices do not shorten (bubble, collectives, update) over seconds of
        computation on one device; assumed to be constant.
      efficiency: efficiency of the planned devices.
      most_devices: largest number of devices with the wanted efficiency.
      link_factor: factor by which links must be faster to hide collectives behind computation, with the same
        latencies; inf if the latencies are longer than the computation.
    """

    overhead_ratio: float
    efficiency: float
    most_devices: float
    link_factor: float


def scaling(each: KindPlan, best: RankedChoice, efficiency: float) -> Scaling:
    """Return how a choice of a plan scales (Zou et al. 2017).

    Args:
      each: the plan of the kind.
      best: the choice.
      efficiency: the wanted efficiency.
    """
    seconds, num_devices = best.prediction.seconds, each.kind.devices or 1
    latency = _latency_seconds(each, best)
    sent, left = sum(seconds.collectives.values()) - latency, seconds.compute - latency
    overhead = seconds.total - seconds.compute
    ratio = overhead / (seconds.compute * num_devices)
    return Scaling(
        overhead_ratio=ratio,
        efficiency=compute_speedup(ratio, num_devices) / num_devices,
        most_devices=compute_most_devices(ratio, efficiency),
        link_factor=sent / left if left > 0 else math.inf,
    )


def _latency_seconds(each: KindPlan, best: RankedChoice) -> float:
    """Return the part of the seconds of collectives that faster links do not shorten."""
    (step,) = steps(each.subject, each.machine, each.kind.devices or 1, [best.choice])
    times = compute_step_times(step, each.machine)
    found = sum(one.latency_seconds for one in times.collectives)
    # the rest is sent between the stages of a pipeline, with the same part of latency each time
    all_seconds = sum(best.prediction.seconds.collectives.values())
    between = all_seconds - sum(one.seconds for one in times.collectives)
    link = each.machine.link((axes.PIPELINE,), step.sizes)
    return found + (between * link.latency_seconds / times.hop if times.num_stages > 1 and times.hop else 0.0)


def rank_by_remat(each: KindPlan, best: RankedChoice) -> list[RankedChoice]:
    """Return the best choice for each remat policy, with the layout and schedule of a plan's best choice.

    Args:
      each: the plan of the kind.
      best: the choice whose layout and schedule are kept.

    Returns:
      For each remat policy of the model, in the order of increasing recomputation, the fastest choice that
      fits, or the smallest one.
    """
    remats = REMATS if best.choice.remat is not None else (None,)
    layout, found = best.choice.layout, []
    for remat in filter(each.subject.has_remat, remats):
        space = Space(layout=layout, remats=(remat,), schedules=(best.choice.schedule,))
        ranked = search(each.subject, each.machine, each.kind.devices or 1, space, 1000).ranked
        found += [one for one in ranked if replace(one.choice.layout, mesh=layout.mesh) == layout][:1]
    return found
