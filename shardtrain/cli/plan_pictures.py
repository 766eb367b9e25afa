"""`shardtrain plan --frontier FILE`: draw memory against time for each kind of islands."""

from collections.abc import Sequence
from pathlib import Path

from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.search import frontier
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject
from shardtrain.report.plots.frontier import frontier_plot


def draw_frontiers(path: Path, plan: ClusterPlan, subjects: Sequence[Subject], space: Space) -> str:
    """Draw the frontier of each kind of islands; return lines that say where.

    Args:
      path: the file; of several kinds each file has the kind behind its name.
      plan: the plan; kinds on which nothing runs are left out.
      subjects: of each kind, as for `plan_cluster`.
      space: what may be chosen.
    """
    lines = []
    for each, subject in zip(plan.kinds, subjects, strict=True):
        several, devices = len(plan.shares) > 1, each.kind.devices or 1
        if not each.plan.ranked:
            continue
        subject = subject.share(each.rows) if several else subject
        best, points = frontier(subject, each.machine, devices, space)
        file = path.with_stem(f"{path.stem}_{each.kind.kind}") if len(plan.kinds) > 1 else path
        frontier_plot(
            best,
            points,
            each.machine.rates.memory_bytes,
            file,
            title=f"{each.kind.kind}: {devices} device{'s' * (devices > 1)}, {each.rows} rows",
        )
        lines.append(f"frontier: {file}, {len(best)} ways\n")
    return "".join(lines)
