"""Format a search over the shardings of operators for `shardtrain plan --operators`."""

from shardtrain.plan.simulator.operator_search import OperatorPlan, StepScore
from shardtrain.plan.simulator.operator_shardings import ShardedOperators, Sharding
from shardtrain.report.quantities import bytes_text, seconds_text
from shardtrain.report.tables import table_text

MOST_SHOWN = 16


def operators_text(plan: OperatorPlan, proposals: int) -> str:
    """Format the best sharding found from each start, and its differences from rules.

    Args:
      plan: the plan.
      proposals: number of proposals from each start.
    """
    space, best = plan.space, plan.best
    sizes = " x ".join(map(str, space.sizes.values()))
    text = (
        f"\nsharding of {len(space.graph.operators)} operators over {sizes} devices, {proposals} proposals"
        " from each start\n"
    )
    rows = [
        (name, format_judged(each.start), format_judged(each.found), str(each.accepted))
        for name, each in plan.searched.items()
    ]
    text += table_text(("start", "step", "best found", "kept"), rows)
    start = plan.searched[f"rules: {plan.rules}"].start
    if start.fits:
        beside = f"{100 * (1 - best.found.seconds / start.seconds):.1f}% less than the best layout by rules"
    else:
        beside = "and the best layout by rules is too large"
    text += (
        f"best: {format_judged(best.found)}, {beside}; {bytes_text(space.memory_bytes(best.shardings))} of"
        " parameters, gradients, optimizer state and kept activations\n"
    )
    return text + _differences(plan)


def format_judged(judged: StepScore) -> str:
    """Format the seconds of a step, and whether it fits.

    >>> format_judged(StepScore(0.44, 0.02, False))
    '20 ms, too large'
    """
    return seconds_text(judged.seconds) + ("" if judged.fits else ", too large")


def _differences(plan: OperatorPlan) -> str:
    space, best = plan.space, plan.best.shardings
    different = [
        (max(space.seconds(i, rule), space.seconds(i, found)), i)
        for i, (rule, found) in enumerate(zip(plan.by_rules, best, strict=True))
        if split_text(space, rule) != split_text(space, found)
    ]
    if not different:
        return "it shards every operator as the rules do\n"
    shown = sorted(different, reverse=True)[:MOST_SHOWN]
    rows = [
        (
            space.graph.operators[i].name,
            split_text(space, plan.by_rules[i]),
            split_text(space, best[i]),
            seconds_text(space.seconds(i, plan.by_rules[i])),
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
