"""Choose the islands of a cluster that make a step shorter, as replicas or as stages of pipelines.

Next: `islands.py` and `island_stages.py`, which predict these two; `report/plan_pools.py`.
"""

import math
from dataclasses import dataclass, replace

from shardtrain.islands.cluster import IslandKind
from shardtrain.plan.island_stages import IslandPipelines, StagesPlan, plan_stages
from shardtrain.plan.islands import ClusterPlan, ReplicaPlanner

MOST_SINGLE = 4
"""Up to this number the islands of a kind are added one by one, else in powers of two."""

LEAST_GAIN = 0.01
"""The part of a step that added islands must save; predictions are not exact."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Islands that are used together.

    Args:
      counts: number of islands of each kind of the cluster.
      replicas: the plan of these islands as replicas.
      pipelines: pipelines over them, the fastest of each form, fastest first.
      problem: why there are no pipelines; "" if there are some, or one island.
    """

    counts: tuple[int, ...]
    replicas: ClusterPlan
    pipelines: tuple[StagesPlan, ...] = ()
    problem: str = ""

    @property
    def best(self) -> ClusterPlan | StagesPlan:
        """The fastest way that fits; replicas if nothing fits."""
        ways = [*([self.replicas] if self.replicas.fits else ()), *self.pipelines]
        return min(ways, key=lambda each: each.seconds, default=self.replicas)

    @property
    def fits(self) -> bool:
        """Whether any way fits the memory."""
        return self.replicas.fits or bool(self.pipelines)

    @property
    def seconds(self) -> float:
        """Seconds of the best step; inf if nothing fits."""
        return self.best.seconds if self.fits else math.inf

    @property
    def order(self) -> tuple[int, ...]:
        """The kind of each island, in the order of the best way."""
        if isinstance(self.best, StagesPlan):
            return tuple(kind for kinds in self.best.islands for kind in kinds)
        return tuple(kind for kind, count in enumerate(self.counts) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class Addition:
    """Islands of a kind that are added to those used so far.

    Args:
      kind: the kind, with the number of islands that are added.
      pool: the islands together. None means that nothing runs on the added ones.
      verdict: "used", or why they are left out; "" if another number of them is used.
    """

    kind: IslandKind
    pool: Pool | None
    verdict: str

    @property
    def seconds(self) -> float:
        """Seconds of a step with them; inf if nothing fits."""
        return math.inf if self.pool is None else self.pool.seconds


@dataclass(frozen=True, kw_only=True)
class PoolsPlan:
    """The islands of a cluster that are used, and what was compared.

    Args:
      pool: the islands that are used.
      additions: what was tried, in this order.
      left_out: kind -> number of islands that are left out.
    """

    pool: Pool
    additions: tuple[Addition, ...]
    left_out: dict[str, int]


def plan_pools(planner: ReplicaPlanner, pipelines: IslandPipelines | str) -> PoolsPlan:
    """Add islands to the one whose step is shortest, kind by kind in this order, if a step gets shorter.

    Args:
      planner: plans replicas.
      pipelines: plans pipelines, or why the run cannot have them.

    Raises:
      ValueError: nothing runs on any kind.
    """
    islands = planner.cluster.islands
    counts, best, seconds, additions = [0] * len(islands), None, math.inf, list[Addition]()
    alone = [_predict_alone(planner, kind) for kind in range(len(islands))]
    # those that do not fit alone last: more of them may
    for kind in sorted(range(len(islands)), key=lambda each: (alone[each], -planner.speeds[each])):
        trials = []
        for number in list_numbers(islands[kind].count):
            together = (*counts[:kind], number, *counts[kind + 1 :])
            added = replace(islands[kind], count=number)
            try:
                pool = _plan_pool(planner, pipelines, together)
            except ValueError as problem:
                trials.append(Addition(kind=added, pool=None, verdict=str(problem)))
                continue
            verdict = _compare(pool.seconds / seconds) if pool.fits else "does not fit"
            trials.append(Addition(kind=added, pool=pool, verdict=verdict))
        # of equally fast ones the most: while nothing fits, more islands may
        chosen = min(reversed(trials), key=lambda each: each.seconds)
        least = (1 - LEAST_GAIN) * seconds
        if chosen.pool is not None and (chosen.seconds < least or math.isinf(seconds)):
            best, seconds, counts[kind] = chosen.pool, chosen.seconds, chosen.kind.count
            for number, each in enumerate(trials):
                if not math.isinf(each.seconds):
                    trials[number] = replace(each, verdict="used" if each is chosen else "")
        additions += trials
    if best is None:
        raise ValueError("\n".join(dict.fromkeys(each.verdict for each in additions)))
    left = {each.kind: each.count - count for each, count in zip(islands, counts, strict=True)}
    return PoolsPlan(
        pool=replace(best, replicas=planner.finish(best.replicas)),
        additions=tuple(additions),
        left_out={kind: number for kind, number in left.items() if number},
    )


def list_numbers(count: int) -> list[int]:
    """Return the numbers of islands of a kind to try.

    >>> list_numbers(3), list_numbers(20)
    ([1, 2, 3], [1, 2, 4, 8, 16, 20])
    """
    return [n for n in range(1, count + 1) if count <= MOST_SINGLE or n & (n - 1) == 0 or n == count]


def _predict_alone(planner: ReplicaPlanner, kind: int) -> float:
    """Predict the seconds of a step of one island; inf if it does not fit."""
    counts = tuple(int(each == kind) for each in range(len(planner.speeds)))
    try:
        return Pool(counts=counts, replicas=planner.plan(counts)).seconds
    except ValueError:
        return math.inf


def _compare(ratio: float) -> str:
    if ratio < 1:
        return f"left out: saves less than {LEAST_GAIN:.0%} of a step"
    return f"left out: a step takes {ratio:.{2 if ratio < 100 else 0}f} times as long"


def _plan_pool(planner: ReplicaPlanner, pipelines: IslandPipelines | str, counts: tuple[int, ...]) -> Pool:
    pool = Pool(counts=counts, replicas=planner.plan(counts))
    if sum(counts) == 1:
        return pool
    if isinstance(pipelines, str):
        return replace(pool, problem=pipelines)
    try:
        return replace(pool, pipelines=tuple(plan_stages(pipelines, pool.order)))
    except ValueError as problem:
        return replace(pool, problem=str(problem))
