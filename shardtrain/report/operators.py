"""Format a search over the shardings of operators for `shardtrain plan --operators`."""

from collections.abc import Sequence

from shardtrain.plan.operators.search import OperatorPlan, SearchResult
from shardtrain.plan.operators.shardings import ShardedOperators, Sharding
from shardtrain.plan.space import mesh_text
from shardtrain.report.quantities import bytes_text, seconds_text
from shardtrain.report.tables import table_text

MOST_SHOWN = 16


def operators_text(plan: OperatorPlan) -> str:
    """Format what the best shardings of operators gain, and how they differ from rules.

    Args:
      plan: the plan.
    """
    layout, best = plan.best_layout, plan.best
    if not plan.searched:
        return (
            "\noperators: no layout to start from: the model has experts, or each layout only splits rows,"
            " sequences or channels of convolutions, or sends less than its operators would by themselves\n"
        )
    starts = ", ".join(mesh_text(each.layout.choice.layout) for each in plan.searched)
    text = f"\noperators: searched from {starts}\n"
    if best is None:
        return f"{text}nothing that is better, and sends no more bytes than the best layout\n"
    gain = 100 * (1 - best.prediction.seconds.total / layout.prediction.seconds.total)
    gain = f"{abs(gain):.1f}% {'less' if gain > 0 else 'more'} time than the best layout"
    if best.result.best.judged.fits > layout.fits:
        gain = "it fits, as no layout does"
    sent, before = (bytes_text(total) for total in (best.sent_bytes, plan.best_bytes))
    text += f"the best, on {mesh_text(best.layout.choice.layout)}: {gain}; a device sends {sent},"
    text += f" with the best layout {before}\n"
    return text + _differences(best.result)


def _differences(found: SearchResult) -> str:
    space, ruled, best = found.best.space, found.start.shardings, found.best.shardings
    rows = []
    for lead, members in space.graph.groups.items():
        if ruled[lead] != best[lead]:
            of_ways = [
                (split_text(space, lead, way[lead]), _sum_seconds(space, members, way))
                for way in (ruled, best)
            ]
            (before, took), (after, takes) = of_ways
            rows.append((max(took, takes), space.graph.operators[lead].scope, before, after, took, takes))
    shown = [
        (*row, seconds_text(took), seconds_text(takes)) for _, *row, took, takes in sorted(rows, reverse=True)
    ]
    title = (
        f"{len(rows)} operators, and what follows each, are sharded differently than by rules; the longest:"
    )
    return table_text(("operator", "by rules", "best", "takes", "then"), shown[:MOST_SHOWN], title=title)


def _sum_seconds(space: ShardedOperators, numbers: Sequence[int], shardings: Sequence[Sharding]) -> float:
    return sum(space.seconds(number, shardings[number]) for number in numbers)


def split_text(space: ShardedOperators, number: int, sharding: Sharding) -> str:
    """Format how an operator is sharded: each dim and over how many devices."""
    parts: dict[str, int] = {}
    for size, dim in zip(space.sizes.values(), sharding, strict=True):
        if dim is not None:
            summed = "" if dim in space.graph.operators[number].result else " (summed)"
            name = dim.partition(":")[0] + summed
            parts[name] = size * parts.get(name, 1)
    return ", ".join(f"{name} {size}" for name, size in sorted(parts.items())) or "whole"
