"""Format the advice on a plan for `shardtrain plan --advise`: scaling, and what memory allows."""

import math

from shardtrain.plan.advice.efficiency import rank_by_remat, scaling
from shardtrain.plan.islands import ClusterPlan, KindPlan
from shardtrain.report.quantities import bytes_text, seconds_text
from shardtrain.report.tables import table_text

EFFICIENCY = 0.8
"""The efficiency for which the largest number of devices is shown."""


def plan_advice_text(plan: ClusterPlan) -> str:
    """Format how the best choice for each kind of islands scales, and what memory allows on its mesh."""
    return "".join(_kind_text(each) for each in plan.kinds if each.plan.ranked and each.rows)


def _kind_text(each: KindPlan) -> str:
    best, devices = each.plan.ranked[0], each.kind.devices or 1
    found = scaling(each, best, EFFICIENCY)
    allowed = "any number of" if math.isinf(found.most_devices) else f"at most {found.most_devices:.0f}"
    lines = [
        f"\n{each.kind.kind}: efficiency {found.efficiency:.0%} on {devices} devices; {EFFICIENCY:.0%} allows"
        f" {allowed} devices, if bubble, collectives and update stay as long as they are"
        f" ({found.overhead_ratio:.2g} of the computation on one device)",
    ]
    if math.isinf(found.link_factor):
        lines.append(
            "collectives cannot be hidden: no link is fast enough, as latency alone exceeds the computation"
        )
    elif found.link_factor > 0:
        less = found.link_factor <= 1
        lines.append(
            "collectives "
            + ("could be hidden behind computation" if less else "are longer than computation: to hide them,")
            + (" if they overlapped" if less else f" links must be {found.link_factor:.2g} times as fast")
            + ", and nothing overlaps in this prediction"
        )
    rows = [
        (
            one.choice.remat or "as it is",
            str(one.choice.accumulate),
            bytes_text(one.prediction.memory.total),
            "yes" if one.fits else "no",
            seconds_text(one.prediction.seconds.total),
        )
        for one in rank_by_remat(each, best)
    ]
    header = ("remat", "microbatches", "memory", "fits", "step")
    return "\n".join(lines) + "\n" + table_text(header, rows, title="on the mesh of the best way")
