"""Plan pipelines over islands, each of which is a stage with a mesh of its own, cut by time.

The alternative, islands as replicas, is `islands.py`. Several pipelines side by side share the batch by their
predicted speed, and add up their gradients. Next: `report/plan.py`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardtrain.pipeline.stage_cut import NoCut
from shardtrain.plan.hlo.collectives import ALL_REDUCE
from shardtrain.plan.island_pipelines import IslandPipelines, PipelinePlan
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject
from shardtrain.plan.traffic import sent_bytes
from shardtrain.sharding.axis_sizes import divisors
from shardtrain.sharding.shares import shares

PER_STAGE = (1, 2, 4)
"""Microbatches for each stage that are tried, rounded down to what divides the batch."""

ROUNDS = 3
"""How often rows are given anew by the speeds that were predicted for those of the last round."""


@dataclass(frozen=True, kw_only=True)
class StagesPlan:
    """Pipelines over islands: island i is stage i % partitions of pipeline i // partitions.

    Args:
      pipelines: all have as many islands.
      accumulate: number of microbatches, of each.
      join_seconds: until their gradients are added up.
    """

    pipelines: tuple[PipelinePlan, ...]
    accumulate: int
    join_seconds: float = 0.0

    @property
    def partitions(self) -> int:
        """The number of islands of a pipeline."""
        return len(self.slowest.counts)

    @property
    def slowest(self) -> PipelinePlan:
        """The pipeline with the longest step."""
        return max(self.pipelines, key=lambda each: each.seconds)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.slowest.seconds + self.join_seconds

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each pipeline."""
        return tuple(each.rows for each in self.pipelines)

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Of a device of each island."""
        return tuple(number for each in self.pipelines for number in each.memory_bytes)

    @property
    def cuts(self) -> str:
        """The blocks of each stage as `--stages` takes them: one cut for all pipelines, or one each."""
        texts = [",".join(map(str, each.counts)) for each in self.pipelines]
        return ";".join(texts if len(set(texts)) > 1 else texts[:1])


def plan_stages(
    subjects: Sequence[Subject], plan: ClusterPlan, space: Space | None = None, *, one_cut: bool = False
) -> StagesPlan:
    """Return the best pipelines with a stage on each island, in the order of the cluster file.

    Args:
      subjects: of each kind of islands, as for `plan_cluster`.
      plan: the plan of islands as replicas; it says the machine of each kind.
      space: what may be chosen, for its rules and recomputation; None: everything.
      one_cut: whether all pipelines must be cut alike.

    Raises:
      ValueError: the model does not say its blocks, or there are fewer than islands of any pipeline; the
        batch cannot be split over the devices and microbatches; or no cut fits the memory.
    """
    chain, num_islands = subjects[0].model_of(None).chain, len(plan.shares)
    if chain is None:
        raise ValueError(
            "the model does not say what its blocks are; give it `blocks` (docs/pipeline.md), or let"
            " --across pipeline cut it by tracing"
        )
    sizes = [number for number in divisors(num_islands) if number > 1]
    if not (possible := [number for number in sizes if number <= chain.num_blocks]):
        raise ValueError(
            f"{chain.num_blocks} blocks cannot be cut into {' or '.join(map(str, sizes))} stages, one for"
            f" each island of a pipeline; use a number of islands that {_several(chain.num_blocks)} divides"
        )
    pipelines = IslandPipelines(subjects, plan, space or Space())
    found, problems = [], []
    for num_stages in possible:
        for accumulate in _microbatches(subjects[0].batch_rows, num_stages):
            try:
                found += _of(pipelines, plan, subjects[0].batch_rows, num_stages, accumulate, one_cut)
            except ValueError as error:
                problems.append(error)
    if not found:
        # what does not fit the memory could be split
        raise next((error for error in problems if isinstance(error, NoCut)), problems[0])
    return min(found, key=lambda each: each.seconds)


def _several(most: int) -> str:
    """Return the possible numbers of stages in words.

    >>> _several(2), _several(4)
    ('2', 'a number from 2 to 4')
    """
    return "2" if most == 2 else f"a number from 2 to {most}"


def _microbatches(rows: int, num_stages: int) -> list[int]:
    """Return the numbers of microbatches to try.

    >>> _microbatches(48, 4)
    [4, 8, 16]
    """
    return sorted({max(n for n in divisors(rows) if n <= k * num_stages) for k in PER_STAGE})


def _of(
    pipelines: IslandPipelines,
    plan: ClusterPlan,
    batch_rows: int,
    num_stages: int,
    accumulate: int,
    one_cut: bool,
) -> Iterator[StagesPlan]:
    """Return pipelines of so many stages, with rows by the speed that was predicted in the round before.

    Raises:
      ValueError: the batch cannot be split over them; NoCut: no cut fits the memory.
    """
    kinds = pipelines.kinds
    pools = [kinds[first : first + num_stages] for first in range(0, len(kinds), num_stages)]
    multiples = [accumulate * math.lcm(*map(pipelines.num_devices, pool)) for pool in pools]
    speeds = [sum(map(pipelines.speed, pool)) for pool in pools]
    before: list[int] = []
    for _ in range(ROUNDS):
        try:
            rows = shares(batch_rows, speeds, minimum=1, multiples=multiples)
        except ValueError:
            devices = " and ".join(str(pipelines.num_devices(kind)) for kind in dict.fromkeys(kinds))
            text = f" in each of {len(pools)} pipelines" if len(pools) > 1 else ""
            raise ValueError(
                f"{accumulate} microbatches of {batch_rows} rows cannot be split over {devices} devices"
                f"{text}; use a larger batch"
            ) from None
        if rows == before:
            return
        before = rows
        planned = pipelines.planned(pools, rows, accumulate, one_cut=one_cut)
        yield StagesPlan(
            pipelines=tuple(planned), accumulate=accumulate, join_seconds=_join_seconds(planned, plan)
        )
        speeds = [each.rows / each.seconds for each in planned]


def _join_seconds(planned: Sequence[PipelinePlan], plan: ClusterPlan) -> float:
    """Return the seconds until each block's gradients are added up over its owners, by rings."""
    most = max(number for each in planned for number in each.gradient_bytes)
    return sent_bytes(ALL_REDUCE, len(planned), most) / plan.link_bytes_per_second
