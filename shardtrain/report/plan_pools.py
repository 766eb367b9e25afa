"""Format which islands of a cluster help, and the ways to use them."""

import math
from collections import Counter
from collections.abc import Sequence

from shardtrain.islands.cluster import IslandKind, add_up_devices
from shardtrain.plan.island_orders import name_distribution
from shardtrain.plan.island_stages import StagesPlan
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.pools import Addition, Pool, PoolsPlan
from shardtrain.report.quantities import bytes_text, count_text, seconds_text
from shardtrain.report.tables import table_text

WAY_COLUMNS = (
    "", "islands", "blocks", "rows", "microbatches", "step", "computes", "waits", "joined in",
    "memory of a device",
)  # fmt: skip


def pools_text(plan: PoolsPlan, kinds: Sequence[IslandKind]) -> str:
    """Format what each addition of islands brings, and the ways to use those that help.

    Args:
      plan: the plan.
      kinds: the kinds of the cluster; the text is empty if there is one island.
    """
    if sum(each.count for each in kinds) == 1:
        return ""
    subject = plan.pool.replicas.kinds[0].subject
    has_units = subject.unit != "examples" and bool(subject.row_units)
    unit, row_units = (subject.unit, subject.row_units or 1.0) if has_units else ("examples", 1.0)
    rates = {"for a price of 1": ("price_per_hour", 1 / 3600), "a joule": ("watts", 1.0)}
    given = {name: each for name, each in rates.items() if add_up_devices(kinds, each[0])}
    rows = []
    for each in plan.additions:
        cells = [_format_added(each), *("" for _ in range(3 + len(given)))]
        if each.pool is not None and each.pool.fits:
            per_second = subject.batch_rows * row_units / each.pool.seconds
            used = [one.kind for one in each.pool.replicas.kinds]
            figures = [factor * (add_up_devices(used, key) or 0.0) for key, factor in given.values()]
            cells[1:] = (
                name_way(each.pool.best),
                seconds_text(each.pool.seconds),
                *(count_text(per_second / figure) if figure else "free" for figure in (1.0, *figures)),
            )
        rows.append((*cells, each.verdict.partition("\n")[0]))
    header = ("islands", "as", "step", f"{unit}/s", *(f"{unit} {name}" for name in given), "")
    text = table_text(header, rows, title="which islands help, the shortest step first")
    if plan.left_out:
        text += f"left out: {', '.join(f'{n} x {kind}' for kind, n in plan.left_out.items())}\n"
    return text + _ways_text(plan.pool, kinds)


def _format_added(each: Addition) -> str:
    is_added = each.pool is not None and sum(each.pool.counts) > each.kind.count
    return "+ " * is_added + f"{each.kind.count} x " * (each.kind.count > 1) + each.kind.kind


def name_way(way: ClusterPlan | StagesPlan) -> str:
    """Name how islands are used."""
    if isinstance(way, ClusterPlan):
        return "replicas" if len(way.shares) > 1 else "one island"
    number = len(way.pipelines)
    return "1 pipeline" if number == 1 else f"{number} pipelines, {name_distribution(way.islands)}"


def _ways_text(pool: Pool, kinds: Sequence[IslandKind]) -> str:
    """Compare replicas and pipelines over the islands that are used."""
    if sum(pool.counts) == 1:
        return ""
    ways = sorted((pool.replicas, *pool.pipelines), key=lambda each: each.seconds)
    limits = [each.machine.rates.memory_bytes for each in pool.replicas.kinds]
    free = "" if math.isinf(min(limits)) else f"; usable: {', '.join(map(bytes_text, limits))}"
    rows = [_replicas_row(way) if isinstance(way, ClusterPlan) else _stages_row(way, kinds) for way in ways]
    text = table_text(WAY_COLUMNS, rows, title=f"ways to use these islands{free}")
    return text + (f"as pipelines, a stage on each island: {pool.problem}\n" if pool.problem else "")


def _replicas_row(way: ClusterPlan) -> tuple[str, ...]:
    best = [each.plan.ranked[0] for each in way.kinds]
    slowest = way.slowest.plan.ranked[0].prediction.seconds
    names = [f"{each.kind.count} x {each.kind.kind}" for each in way.kinds]
    return (
        name_way(way) + " (too large)" * (not way.fits),
        ", ".join(names),
        "all",
        ",".join(map(str, way.shares)),
        ",".join(str(each.choice.accumulate) for each in best),
        seconds_text(way.seconds),
        seconds_text(slowest.compute),
        seconds_text(slowest.bubble),
        seconds_text(way.join_seconds),
        ", ".join(bytes_text(each.prediction.memory.total) for each in best),
    )


def _stages_row(way: StagesPlan, kinds: Sequence[IslandKind]) -> tuple[str, ...]:
    names = Counter(" > ".join(kinds[kind].kind for kind in each) for each in way.islands)
    return (
        name_way(way),
        " | ".join(f"{number} x ({name})" if number > 1 else name for name, number in names.items()),
        way.cuts,
        ",".join(map(str, way.rows)),
        f"{way.accumulate}" + f", {way.in_flight} in flight" * (way.in_flight > 1),
        seconds_text(way.seconds),
        seconds_text(way.slowest.compute_seconds),
        seconds_text(way.slowest.bubble_seconds),
        seconds_text(way.join_seconds),
        ", ".join(map(bytes_text, way.memory_bytes)),
    )
