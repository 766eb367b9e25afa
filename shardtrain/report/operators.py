"""Format a search over the shardings of operators for `shardtrain plan --operators`."""

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
            "\noperators: no layout to start from, as the model has experts, or all layouts only split rows\n"
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
    different = [
        (max(space.seconds(i, rule), space.seconds(i, found)), i)
        for i, (rule, found) in enumerate(zip(ruled, best, strict=True))
        if split_text(space, rule) != split_text(space, found)
    ]
    shown = sorted(different, reverse=True)[:MOST_SHOWN]
    rows = [
        (
            space.graph.operators[i].name,
            split_text(space, ruled[i]),
            split_text(space, best[i]),
            seconds_text(space.seconds(i, ruled[i])),
            seconds_text(space.seconds(i, best[i])),
        )
        for _, i in shown
    ]
    title = f"{len(different)} operators are sharded differently than by rules; the longest:"
    return table_text(("operator", "by rules", "best", "takes", "then"), rows, title=title)


def split_text(space: ShardedOperators, sharding: Sharding) -> str:
    """Format how an operator is sharded: each dim and over how many devices."""
    parts: dict[str, int] = {}
    for size, dim in zip(space.sizes.values(), sharding, strict=True):
        if dim is not None:
            parts[dim] = size * parts.get(dim, 1)
    return ", ".join(f"{dim} {number}" for dim, number in sorted(parts.items())) or "whole"
