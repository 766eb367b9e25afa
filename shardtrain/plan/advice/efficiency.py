"""How many devices an overhead allows, and what hides synchronisation behind computation; for a plan too.

Source: Zou et al. 2017, "Distributed Training Large-Scale Deep Architectures", https://arxiv.org/abs/1709.06622
(its lemmas on the number of GPUs and of parameter servers).
"""

import math
from dataclasses import replace
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.hlo.collectives import ALL_REDUCE
from shardtrain.plan.islands import KindPlan
from shardtrain.plan.predict import steps
from shardtrain.plan.search import Ranked, search
from shardtrain.plan.space import REMATS, Space
from shardtrain.plan.step_times import step_times
from shardtrain.plan.subject import Subject
from shardtrain.plan.traffic import count_sent_bytes


def speedup(overhead_ratio: float, devices: int) -> float:
    """Return how much faster a step of the same batch is on several devices than on one.

    One device takes computation + overhead; several share the computation, not the overhead.

    Args:
      overhead_ratio: R_O, seconds of overhead over seconds of computation on one device.
      devices: G.

    Returns:
      (1 + R_O) / (1 / G + R_O); G times the efficiency.

    >>> round(speedup(0.1, 4), 3)
    3.143
    """
    return (1 + overhead_ratio) / (1 / devices + overhead_ratio)


def most_overhead(efficiency: float, devices: int) -> float:
    """Return the largest overhead ratio that still gives an efficiency: R_O <= (1 - a) / (a G - 1).

    Args:
      efficiency: a, speedup over devices.
      devices: G.

    Returns:
      Seconds of overhead over seconds of computation on one device; inf where any overhead will do, as
      a G <= 1.

    >>> round(most_overhead(0.8, 4), 4), most_overhead(0.5, 2)
    (0.0909, inf)
    """
    return math.inf if efficiency * devices <= 1 else (1 - efficiency) / (efficiency * devices - 1)


def most_devices(overhead_ratio: float, efficiency: float) -> float:
    """Return the largest number of devices that have an efficiency: G <= (1 + (1 - a) / R_O) / a.

    Args:
      overhead_ratio: R_O, as in `speedup`; assumed not to grow with the devices.
      efficiency: a.

    Returns:
      A whole number from 1; inf without overhead.

    >>> most_devices(0.1, 0.8), most_devices(0.0, 0.8)
    (3, inf)
    """
    if overhead_ratio == 0:
        return math.inf
    # a result that is whole but for rounding is whole
    return max(math.floor((1 + (1 - efficiency) / overhead_ratio) / efficiency + 1e-9), 1)


def servers_to_hide(
    parameter_bytes: float, workers: int, server_bytes_per_second: float, compute_seconds: float
) -> int:
    """Return how many parameter servers hide their traffic behind the computation of a step.

    Each worker sends gradients and receives parameters: 2 S N bytes pass the links of all servers while
    the workers compute for T seconds, so N_ps >= 2 S N / (B T).

    Args:
      parameter_bytes: S, of all parameters as they are sent.
      workers: N.
      server_bytes_per_second: B, of a server's link.
      compute_seconds: T, of a step.

    >>> servers_to_hide(240e6, 8, 1.25e9, 0.5)
    7
    """
    return math.ceil(2 * parameter_bytes * workers / (server_bytes_per_second * compute_seconds))


def bandwidth_to_hide(parameter_bytes: float, members: int, compute_seconds: float) -> float:
    """Return the bytes a second that hide a ring all-reduce behind the computation of a step.

    Args:
      parameter_bytes: of all gradients as they are sent.
      members: of the ring; 1 needs no link.
      compute_seconds: what the all-reduce may overlap with.

    Returns:
      What each member must send in a second: 2 (n - 1) / n times the bytes, over the seconds.

    >>> bandwidth_to_hide(400e6, 4, 0.5)
    1200000000.0
    """
    return count_sent_bytes(ALL_REDUCE, members, parameter_bytes) / compute_seconds


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
        efficiency=speedup(ratio, num_devices) / num_devices,
        most_devices=most_devices(ratio, efficiency),
        link_factor=sent / left if left > 0 else math.inf,
    )


def _latency_seconds(subject: Subject, each: KindPlan, best: Ranked) -> float:
    """Return the part of the seconds of collectives that faster links do not shorten."""
    (step,) = steps(subject, each.machine, each.kind.devices or 1, [best.choice])
    times = step_times(step, each.machine)
    found = sum(one.latency_seconds for one in times.collectives)
    # what is left is sent between the stages of a pipeline, each time with the same part of latency
    all_seconds = sum(best.prediction.seconds.collectives.values())
    between = all_seconds - sum(one.seconds for one in times.collectives)
    link = each.machine.link((axes.PIPELINE,), step.sizes)
    return found + (between * link.latency_seconds / times.hop if times.num_stages > 1 and times.hop else 0.0)


def rank_by_remat(subject: Subject, each: KindPlan, best: Ranked) -> list[Ranked]:
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
