"""Plan pipelines over islands, each of which is a stage with its own mesh, cut by time.

Stages are cut as in a run with `--across pipeline --stages time`, by the predicted speed of the model on each
island. Several pipelines split the batch by their speed, and add up their gradients. `islands.py` plans
islands as replicas instead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardtrain import axes
from shardtrain.pipeline.block_costs import GRADIENT_BYTES, model_costs
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import ModelCosts, StageCosts, StageDevices
from shardtrain.pipeline.stage_cut import NoCut, StageCut, best_cut, shortest_cut
from shardtrain.plan.hlo.collectives import ALL_REDUCE
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.space import Space, list_allowed_remats
from shardtrain.plan.subject import Subject
from shardtrain.plan.traffic import count_sent_bytes
from shardtrain.sharding.axis_sizes import divisors
from shardtrain.sharding.shares import shares


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A pipeline over islands, each of which is a stage.

    Args:
      rows: its rows of the batch.
      counts: blocks of each island.
      compute_seconds: seconds of the slowest stage in a step.
      bubble_seconds: seconds that this stage waits.
      collectives_seconds: longest seconds of the collectives inside an island.
      update_seconds: longest seconds of the optimizer on an island.
      memory_bytes: memory of a device of each island.
      gradient_bytes: bytes of the trained parameters of each island, in float32.
    """

    rows: int
    counts: tuple[int, ...]
    compute_seconds: float
    bubble_seconds: float
    collectives_seconds: float
    update_seconds: float
    memory_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of a step, without adding up the gradients of several pipelines."""
        return self.compute_seconds + self.bubble_seconds + self.collectives_seconds + self.update_seconds


class IslandPipelines:
    """Predicts pipelines over the islands of a plan; models are traced once for all of them.

    Inside an island, examples are split over its devices, and the parameters of a stage are replicated.

    Args:
      subjects: the subject of each kind of islands, as for `plan_cluster`.
      plan: the plan of islands as replicas, with the machine of each kind.
      space: its rules and remat policies are used.
    """

    def __init__(self, subjects: Sequence[Subject], plan: ClusterPlan, space: Space) -> None:
        self._subjects, self._plan, self._space = subjects, plan, space
        self._whole: dict[tuple[int, int, int], Prediction] = {}
        self._models: dict[int, ModelCosts] = {}
        self.kinds = [number for number, each in enumerate(plan.kinds) for _ in range(each.kind.count)]

    def num_devices(self, kind: int) -> int:
        """Return the number of devices of an island of a kind."""
        return self._plan.kinds[kind].kind.devices or 1

    def speed(self, kind: int) -> float:
        """Return the flops per second of an island, before anything is predicted."""
        return self.num_devices(kind) * self._plan.kinds[kind].machine.rates.flops_per_second

    def plan(
        self, pipelines: Sequence[Sequence[int]], rows: Sequence[int], accumulate: int, *, one_cut: bool
    ) -> list[PipelinePlan]:
        """Return the best cut of each pipeline.

        Args:
          pipelines: kind of the island of each stage, for each pipeline.
          rows: rows of each, a multiple of `accumulate` and of the devices of each of its islands.
          accumulate: number of microbatches.
          one_cut: whether all have one cut, for the slowest island of each stage.

        Raises:
          NoCut: no cut fits the memory.
        """
        asked = list(zip(map(tuple, pipelines), rows, strict=True))
        costs = {each: self._costs(*each, accumulate) for each in dict.fromkeys(asked)}
        if one_cut:
            common = best_cut(_slowest(list(costs.values()))).counts
            cuts = {each: shortest_cut(own, [common]) for each, own in costs.items()}
        else:
            cuts = {each: best_cut(own) for each, own in costs.items()}
        found = {each: self._plan_pipeline(*each, costs[each], cuts[each]) for each in costs}
        return [found[each] for each in asked]

    def _plan_pipeline(
        self, kinds: tuple[int, ...], rows: int, costs: StageCosts, cut: StageCut
    ) -> PipelinePlan:
        number = costs.table.num_microbatches
        whole = [self._prediction(kind, rows, number) for kind in kinds]
        parts = [count / costs.num_blocks for count in cut.counts]
        ends = [sum(cut.counts[: stage + 1]) for stage in range(len(kinds))]
        state = [
            costs.state_bytes(stage, end - count, end)
            for stage, (end, count) in enumerate(zip(ends, cut.counts, strict=True))
        ]
        gradients = GRADIENT_BYTES * self._subjects[0].num_trained
        busy = number * max(cut.busy_seconds)
        return PipelinePlan(
            rows=rows,
            counts=cut.counts,
            compute_seconds=busy,
            bubble_seconds=cut.simulated.makespan - busy,
            collectives_seconds=max(
                part * sum(each.seconds.collectives.values()) for part, each in zip(parts, whole, strict=True)
            ),
            update_seconds=max(part * each.seconds.update for part, each in zip(parts, whole, strict=True)),
            memory_bytes=cut.memory_bytes,
            # the optimizer's state is in proportion to the parameters
            gradient_bytes=tuple(gradients * each / sum(state) for each in state),
        )

    def _costs(self, kinds: tuple[int, ...], rows: int, accumulate: int) -> StageCosts:
        devices = []
        for kind in kinds:
            number, prediction = self.num_devices(kind), self._prediction(kind, rows, accumulate)
            stage = StageDevices(
                flops_per_second=number * prediction.flops / prediction.seconds.compute,
                memory_bytes=self._plan.kinds[kind].machine.rates.memory_bytes,
                row_shards=number,
            )
            devices.append(stage)
        return StageCosts(
            model=self._model(rows // accumulate),
            devices=devices,
            table=make_table("1f1b", len(kinds), accumulate),
            link_bytes_per_second=self._plan.link_bytes_per_second,
        )

    def _model(self, rows: int) -> ModelCosts:
        """Return the costs of the blocks for a microbatch of `rows` rows."""
        if rows not in self._models:
            subject = self._subjects[0]
            self._models[rows] = model_costs(subject.traced_blocks(rows), subject.optimizer.init)
        return self._models[rows]

    def _prediction(self, kind: int, rows: int, accumulate: int) -> Prediction:
        """Predict the whole model on an island of a kind; a stage takes its share of the time."""
        key = kind, rows, accumulate
        if key not in self._whole:
            subject, devices = self._subjects[kind], self.num_devices(kind)
            layout = replace(
                self._space.layout, mesh={axes.DATA: devices}, sequence_sharded=False, collective_matmul=False
            )
            remat = list_allowed_remats(subject, self._space)[0]
            choice = Choice(layout=layout, accumulate=accumulate, remat=remat)
            machine = self._plan.kinds[kind].machine
            (self._whole[key],) = predict_choices(subject.share(rows), machine, devices, [choice])
        return self._whole[key]


def _slowest(costs: Sequence[StageCosts]) -> StageCosts:
    """Return the costs of a pipeline with the slowest and smallest devices of each stage of several ones."""
    devices = [
        StageDevices(
            flops_per_second=min(each.flops_per_second for each in stage),
            memory_bytes=min(each.memory_bytes for each in stage),
            row_shards=min(each.row_shards for each in stage),
        )
        for stage in zip(*(each.devices for each in costs), strict=True)
    ]
    largest = max(costs, key=lambda each: math.fsum(block.forward_flops for block in each.model.blocks))
    return replace(largest, devices=devices)


PER_STAGE = (1, 2, 4)
"""Numbers of microbatches for each stage to try, rounded down to divide the batch."""

ROUNDS = 3
"""Number of times that rows are split by the speeds that were predicted for the last split."""


@dataclass(frozen=True, kw_only=True)
class StagesPlan:
    """Pipelines over islands: island i is stage i % partitions of pipeline i // partitions.

    Args:
      pipelines: the pipelines, with the same number of islands.
      accumulate: number of microbatches of each.
      join_seconds: seconds of adding up their gradients.
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
        """Memory of a device of each island."""
        return tuple(number for each in self.pipelines for number in each.memory_bytes)

    @property
    def cuts(self) -> str:
        """The blocks of each stage as in `--stages`, one cut for all pipelines or one for each."""
        texts = [",".join(map(str, each.counts)) for each in self.pipelines]
        return ";".join(texts if len(set(texts)) > 1 else texts[:1])


def plan_stages(
    subjects: Sequence[Subject], plan: ClusterPlan, space: Space | None = None, *, one_cut: bool = False
) -> StagesPlan:
    """Return the best pipelines with a stage on each island, in the order of the cluster file.

    Args:
      subjects: the subject of each kind of islands, as for `plan_cluster`.
      plan: the plan of islands as replicas, with the machine of each kind.
      space: its rules and remat policies are used. None means the defaults.
      one_cut: whether all pipelines must have the same cut.

    Raises:
      ValueError: the model does not define its blocks, or has fewer blocks than islands in a pipeline; the
        batch cannot be split over devices and microbatches; or no cut fits the memory.
    """
    num_blocks, num_islands = subjects[0].num_blocks, len(plan.shares)
    sizes = [number for number in divisors(num_islands) if number > 1]
    if not (possible := [number for number in sizes if number <= num_blocks]):
        raise ValueError(
            f"{num_blocks} blocks cannot be cut into {' or '.join(map(str, sizes))} stages, one for"
            f" each island of a pipeline; use a number of islands that {_format_range(num_blocks)} divides"
        )
    pipelines = IslandPipelines(subjects, plan, space or Space())
    found, problems = [], []
    for num_stages in possible:
        for accumulate in _list_microbatches(subjects[0].batch_rows, num_stages):
            try:
                found += _plan_stages(
                    pipelines, plan, subjects[0].batch_rows, num_stages, accumulate, one_cut
                )
            except ValueError as error:
                problems.append(error)
    if not found:
        # a cut that does not fit the memory is nearer to a plan than a batch that cannot be split
        raise next((error for error in problems if isinstance(error, NoCut)), problems[0])
    return min(found, key=lambda each: each.seconds)


def _format_range(most: int) -> str:
    """Format the possible numbers of stages.

    >>> _format_range(2), _format_range(4)
    ('2', 'a number from 2 to 4')
    """
    return "2" if most == 2 else f"a number from 2 to {most}"


def _list_microbatches(rows: int, num_stages: int) -> list[int]:
    """Return the numbers of microbatches to try.

    >>> _list_microbatches(48, 4)
    [4, 8, 16]
    """
    return sorted({max(n for n in divisors(rows) if n <= k * num_stages) for k in PER_STAGE})


def _plan_stages(
    pipelines: IslandPipelines,
    plan: ClusterPlan,
    batch_rows: int,
    num_stages: int,
    accumulate: int,
    one_cut: bool,
) -> Iterator[StagesPlan]:
    """Yield pipelines of `num_stages` stages, with rows split by the speeds of the round before.

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
        planned = pipelines.plan(pools, rows, accumulate, one_cut=one_cut)
        yield StagesPlan(
            pipelines=tuple(planned), accumulate=accumulate, join_seconds=_join_seconds(planned, plan)
        )
        speeds = [each.rows / each.seconds for each in planned]


def _join_seconds(planned: Sequence[PipelinePlan], plan: ClusterPlan) -> float:
    """Return the seconds of adding up each block's gradients over its owners by rings."""
    most = max(number for each in planned for number in each.gradient_bytes)
    return count_sent_bytes(ALL_REDUCE, len(planned), most) / plan.link_bytes_per_second
