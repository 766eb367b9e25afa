"""Plan pipelines over islands, each of which is a stage with its own mesh, cut by time.

Stages are cut as in a run with `--across pipeline --stages time`, by the predicted speed of the model on each
island. Several pipelines split the batch by their speed, and add up their gradients. `islands.py` plans
islands as replicas instead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from shardtrain import axes
from shardtrain.pipeline.block_costs import GRADIENT_BYTES
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts, StageCosts, StageDevices
from shardtrain.pipeline.stage_cut import NoCut, best_cut, shortest_cut
from shardtrain.plan.hlo.collectives import ALL_REDUCE
from shardtrain.plan.island_exchange import own_copies
from shardtrain.plan.island_orders import Islands, list_arrangements, name_distribution
from shardtrain.plan.islands import ReplicaPlanner
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.space import list_allowed_remats
from shardtrain.plan.traffic import count_sent_bytes
from shardtrain.sharding.axis_sizes import divisors
from shardtrain.sharding.shares import shares

UNFLUSHED = 32
"""Batches of a simulated pipeline that is not flushed; filling it once is little of their time."""

TRACED_ROWS = (2, 4)
"""Rows of the microbatches for which the blocks are traced."""


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
    def parts_seconds(self) -> tuple[float, float, float, float]:
        """Seconds of the parts of a step: computation, bubble, collectives, update."""
        return self.compute_seconds, self.bubble_seconds, self.collectives_seconds, self.update_seconds

    @property
    def seconds(self) -> float:
        """Seconds of a step, without adding up the gradients of several pipelines."""
        return sum(self.parts_seconds)


class IslandPipelines:
    """Predicts pipelines over islands; models are traced once, and each pipeline is cut once.

    Inside an island, examples are split over its devices, and the parameters of a stage are replicated.

    Args:
      planner: the subjects, machines and link of the islands; the rules and remat policies of its space.
      one_cut: whether all pipelines have one cut, for the slowest island of each stage.
      unflushed: whether to plan batches in flight too, which islands that synchronise in waves can have.
    """

    def __init__(self, planner: ReplicaPlanner, *, one_cut: bool = False, unflushed: bool = False) -> None:
        self.subject, self._subjects = planner.subjects[0], planner.subjects
        self._machines, self._cluster, self._space = planner.machines, planner.cluster, planner.space
        self.link_bytes_per_second, self.speeds = planner.link_bytes_per_second, planner.speeds
        self.synchronisation, self.unflushed, self._one_cut = planner.synchronisation, unflushed, one_cut
        self._predict, self._costs = cache(self._predict_whole), cache(self._compute_costs)
        self._plan_cut = cache(self._plan_pipeline)

    def num_devices(self, kind: int) -> int:
        """Return the number of devices of an island of a kind."""
        return self._cluster.islands[kind].devices or 1

    def plan(
        self, pipelines: Sequence[tuple[int, ...]], rows: Sequence[int], accumulate: int, in_flight: int = 1
    ) -> list[PipelinePlan]:
        """Return the best cut of each pipeline.

        Args:
          pipelines: kind of the island of each stage, for each pipeline.
          rows: rows of each, a multiple of `accumulate` and of the devices of each of its islands.
          accumulate: number of microbatches.
          in_flight: number of batches in flight.

        Raises:
          NoCut: no cut fits the memory.
        """
        asked = [
            (kinds, number, accumulate, in_flight) for kinds, number in zip(pipelines, rows, strict=True)
        ]
        common = None
        if self._one_cut:
            common = best_cut(_slowest([self._costs(*each) for each in dict.fromkeys(asked)])).counts
        return [self._plan_cut(*each, common) for each in asked]

    def _plan_pipeline(
        self,
        kinds: tuple[int, ...],
        rows: int,
        accumulate: int,
        in_flight: int,
        counts: tuple[int, ...] | None,
    ) -> PipelinePlan:
        """Plan one pipeline, with the given blocks of each stage or the best."""
        costs = self._costs(kinds, rows, accumulate, in_flight)
        cut = best_cut(costs) if counts is None else shortest_cut(costs, [counts])
        whole = [self._predict(kind, rows, accumulate) for kind in kinds]
        parts = [count / costs.num_blocks for count in cut.counts]
        ends = [sum(cut.counts[: stage + 1]) for stage in range(len(kinds))]
        state = [
            costs.state_bytes(stage, end - count, end)
            for stage, (end, count) in enumerate(zip(ends, cut.counts, strict=True))
        ]
        # the optimizer's state is in proportion to the parameters
        gradients = [GRADIENT_BYTES * self.subject.num_trained * each / sum(state) for each in state]
        # each batch in flight has its weights or its gradients, and waves keep what changed
        copies = in_flight - 1 + own_copies(self.synchronisation)
        memory = [each + copies * own for each, own in zip(cut.memory_bytes, gradients, strict=True)]
        most = max(each / device.memory_bytes for each, device in zip(memory, costs.devices, strict=True))
        if copies and most > 1:
            raise NoCut(f"copies of the weights do not fit: a stage needs {most:.2f} times its memory")
        number = costs.table.num_microbatches
        num_steps = 1 if in_flight == 1 else number
        busy = number * max(cut.busy_seconds) / num_steps
        return PipelinePlan(
            rows=rows,
            counts=cut.counts,
            compute_seconds=busy,
            bubble_seconds=cut.simulated.makespan / num_steps - busy,
            collectives_seconds=max(
                part * sum(each.seconds.collectives.values()) for part, each in zip(parts, whole, strict=True)
            ),
            update_seconds=max(part * each.seconds.update for part, each in zip(parts, whole, strict=True)),
            memory_bytes=tuple(memory),
            gradient_bytes=tuple(gradients),
        )

    def _compute_costs(
        self, kinds: tuple[int, ...], rows: int, accumulate: int, in_flight: int
    ) -> StageCosts:
        devices = []
        for kind in kinds:
            number, prediction = self.num_devices(kind), self._predict(kind, rows, accumulate)
            stage = StageDevices(
                flops_per_second=number * prediction.flops / prediction.seconds.compute,
                memory_bytes=self._machines[kind].rates.memory_bytes,
                row_shards=number,
            )
            devices.append(stage)
        return StageCosts(
            model=self._model(rows // accumulate),
            devices=devices,
            table=make_table("1f1b", len(kinds), accumulate if in_flight == 1 else UNFLUSHED),
            link_bytes_per_second=self.link_bytes_per_second,
        )

    def _model(self, rows: int) -> ModelCosts:
        """Return the costs of the blocks for a microbatch of `rows` rows, by which they grow evenly."""
        small, large = map(self.subject.block_costs, TRACED_ROWS)
        part = (rows - TRACED_ROWS[0]) / (TRACED_ROWS[1] - TRACED_ROWS[0])

        def grow(small: BlockCost, large: BlockCost) -> BlockCost:
            costs = {name: (value, getattr(large, name)) for name, value in vars(small).items()}
            return BlockCost(**{name: max(a + part * (b - a), 0.0) for name, (a, b) in costs.items()})

        return ModelCosts(
            blocks=list(map(grow, small.blocks, large.blocks)),
            first=grow(small.first, large.first),
            last=grow(small.last, large.last),
        )

    def _predict_whole(self, kind: int, rows: int, accumulate: int) -> Prediction:
        """Predict the whole model on an island of a kind; a stage takes its share of the time."""
        subject, devices = self._subjects[kind], self.num_devices(kind)
        layout = replace(
            self._space.layout, mesh={axes.DATA: devices}, sequence_sharded=False, collective_matmul=False
        )
        remat = list_allowed_remats(subject, self._space)[0]
        choice = Choice(layout=layout, accumulate=accumulate, remat=remat)
        (found,) = predict_choices(subject.share(rows), self._machines[kind], devices, [choice])
        return found


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
      islands: the kinds of their islands.
      pipelines: the pipelines, with the same number of islands.
      accumulate: number of microbatches of each.
      in_flight: number of batches in flight in each.
      join_seconds: seconds of adding up their gradients or changes.
    """

    islands: Islands
    pipelines: tuple[PipelinePlan, ...]
    accumulate: int
    in_flight: int = 1
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


def plan_stages(pipelines: IslandPipelines, kinds: Sequence[int]) -> list[StagesPlan]:
    """Return the best pipelines of each length and distribution with a stage on each island, fastest first.

    Args:
      pipelines: predicts pipelines.
      kinds: the kind of each island.

    Raises:
      ValueError: the model does not define its blocks, or has fewer blocks than islands in a pipeline; the
        batch cannot be split over devices and microbatches; or no cut fits the memory.
    """
    num_blocks = pipelines.subject.num_blocks
    sizes = [number for number in divisors(len(kinds)) if number > 1]
    if not (possible := [number for number in sizes if number <= num_blocks]):
        raise ValueError(
            f"{num_blocks} blocks cannot be cut into {' or '.join(map(str, sizes))} stages, one for"
            f" each island of a pipeline; use a number of islands with a divisor of 2 to {num_blocks}"
        )
    kinds = sorted(kinds, key=lambda kind: -pipelines.speeds[kind])
    problems, best = [], dict[tuple[int, str, int], StagesPlan]()
    for num_stages in possible:
        batches = [(each, 1) for each in _list_microbatches(pipelines.subject.batch_rows, num_stages)]
        batches += [(1, num_stages)] if pipelines.unflushed else []
        for islands, (accumulate, in_flight) in product(
            sorted(list_arrangements(kinds, num_stages)), batches
        ):
            key = num_stages, name_distribution(islands), in_flight
            try:
                for found in _plan_stages(pipelines, islands, accumulate, in_flight):
                    best[key] = min(best.get(key, found), found, key=lambda each: each.seconds)
            except ValueError as error:
                problems.append(error)
    if not best:
        # a cut that does not fit the memory is nearer to a plan than a batch that cannot be split
        raise next((error for error in problems if isinstance(error, NoCut)), problems[0])
    return sorted(best.values(), key=lambda each: each.seconds)


def _list_microbatches(rows: int, num_stages: int) -> list[int]:
    """Return the numbers of microbatches to try.

    >>> _list_microbatches(48, 4)
    [4, 8, 16]
    """
    return sorted({max(n for n in divisors(rows) if n <= k * num_stages) for k in PER_STAGE})


def _plan_stages(
    pipelines: IslandPipelines, islands: Islands, accumulate: int, in_flight: int
) -> Iterator[StagesPlan]:
    """Yield pipelines over islands, with rows split by the speeds of the round before.

    Raises:
      ValueError: the batch cannot be split over them; NoCut: no cut fits the memory.
    """
    batch_rows = pipelines.subject.batch_rows
    multiples = [accumulate * math.lcm(*map(pipelines.num_devices, kinds)) for kinds in islands]
    speeds = [sum(pipelines.speeds[kind] for kind in kinds) for kinds in islands]
    before: list[int] = []
    for _ in range(ROUNDS):
        try:
            rows = shares(batch_rows, speeds, minimum=1, multiples=multiples)
        except ValueError:
            used = dict.fromkeys(kind for kinds in islands for kind in kinds)
            devices = " and ".join(str(pipelines.num_devices(kind)) for kind in sorted(used))
            text = f" in each of {len(islands)} pipelines" if len(islands) > 1 else ""
            raise ValueError(
                f"{accumulate} microbatches of {batch_rows} rows cannot be split over {devices} devices"
                f"{text}; use a larger batch"
            ) from None
        if rows == before:
            return
        before = rows
        planned = pipelines.plan(islands, rows, accumulate, in_flight)
        # each block's gradients are added up over its owners by rings; changes are pushed as many bytes
        most = max(number for each in planned for number in each.gradient_bytes)
        sent = count_sent_bytes(ALL_REDUCE, len(planned), most)
        yield StagesPlan(
            islands=islands,
            pipelines=tuple(planned),
            accumulate=accumulate,
            in_flight=in_flight,
            join_seconds=sent / pipelines.link_bytes_per_second / pipelines.synchronisation.every,
        )
        speeds = [each.rows / each.seconds for each in planned]
