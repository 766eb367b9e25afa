"""Format a search over the shardings of operators for `shardtrain plan --operators`."""

from shardtrain.plan.simulator.operator_search import OperatorPlan, SearchResult, ShardedStep, StepScore
from shardtrain.plan.simulator.operator_shardings import ShardedOperators, Sharding
from shardtrain.plan.space import mesh_text
from shardtrain.report.quantities import bytes_text, seconds_text
from shardtrain.report.tables import table_text

MOST_SHOWN = 16


def operators_text(plan: OperatorPlan, proposals: int) -> str:
    """Format the best layout, the best shardings of operators found from each start, and how they differ.

    Args:
      plan: the plan.
      proposals: number of proposals from each start.
    """
    number = len(plan.by_rules.space.graph.operators)
    text = f"\nshardings of {number} operators, {proposals} proposals from each layout; collectives overlap\n"
    rows = [(mesh_text(plan.layout), "rules", *_figures(plan.by_rules), "")]
    rows += [
        (mesh_text(layout), "operators", *_figures(each.best), str(each.accepted))
        for layout, each in plan.searched
    ]
    text += table_text(("layout", "shards by", "step", "sent", "memory", "kept"), rows)
    if plan.best is None:
        return f"{text}best: the layout {mesh_text(plan.layout)}\n"
    layout, best = plan.best
    gained = f"{100 * (1 - best.best.judged.seconds / plan.by_rules.judged.seconds):.1f}% less than"
    if not plan.by_rules.judged.fits:
        gained = "which fits, unlike"
    text += f"best: operators on {mesh_text(layout)}, {gained} the best layout by rules\n"
    return text + _differences(best)


def _figures(step: ShardedStep) -> tuple[str, str, str]:
    sent, kept = sum(step.sent_bytes.values()), step.space.memory_bytes(step.shardings)
    return format_judged(step.judged), bytes_text(sent), bytes_text(kept)


def format_judged(judged: StepScore) -> str:
    """Format the seconds of a step, and whether it fits.

    >>> format_judged(StepScore(0.44, 0.02, False))
    '20 ms, too large'
    """
    return seconds_text(judged.seconds) + ("" if judged.fits else ", too large")


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
