"""Compute the costs of pipeline stages that may have several devices each, for a run on a cluster.

Next: `replicated_stages.py`, which cuts a pipeline by these costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardtrain.pipeline.block_costs import GRADIENT_BYTES, model_costs
from shardtrain.pipeline.partition import Costs
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import ModelCosts, StageCosts, StageDevices
from shardtrain.plan.devices import GB
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import divisors


@dataclass(frozen=True, kw_only=True)
class StageDevice:
    """A device of a pipeline, or several equal devices that stay in one stage.

    Args:
      flops_per_second: rate of one device.
      memory_bytes: usable memory of one device.
      node: number of its node.
      number: number of devices.
    """

    flops_per_second: float
    memory_bytes: float = math.inf
    node: int = 0
    number: int = 1


@dataclass(frozen=True, kw_only=True)
class PipelineDevices:
    """The devices of a pipeline and their links.

    Args:
      devices: devices in the order of the stages, node by node.
      device_bytes_per_second: rate between devices of a node.
      node_bytes_per_second: rate between nodes.
    """

    devices: tuple[StageDevice, ...]
    device_bytes_per_second: float = math.inf
    node_bytes_per_second: float = math.inf

    def link(self, a: int, b: int) -> float:
        """Return the bytes per second between two devices."""
        same = self.devices[a].node == self.devices[b].node
        return self.device_bytes_per_second if same else self.node_bytes_per_second

    def stage(self, first: int, end: int, rows: int) -> StageDevices:
        """Return the devices from `first` to before `end` as one stage of replicas with equal rows.

        Rows are padded to a multiple of the devices; devices beyond the rows of a microbatch do nothing.

        Args:
          first, end: numbers of devices.
          rows: rows of a microbatch.
        """
        members = self.devices[first:end]
        of_each = math.ceil(rows / self.number(first, end))
        return StageDevices(
            flops_per_second=rows / of_each * min(device.flops_per_second for device in members),
            memory_bytes=min(device.memory_bytes for device in members),
            row_shards=rows // of_each,
        )

    def number(self, first: int, end: int) -> int:
        """Count devices, where several may count as one entry."""
        return sum(device.number for device in self.devices[first:end])

    def numbers(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Count the devices of each stage."""
        return tuple(self.number(*group) for group in pairwise(accumulate(devices, initial=0)))

    def list_mixed_stages(self, devices: Sequence[int]) -> list[int]:
        """Return the stages with devices of different speed or memory."""
        groups = pairwise(accumulate(devices, initial=0))
        kinds = [{(d.flops_per_second, d.memory_bytes) for d in self.devices[a:b]} for a, b in groups]
        return [stage for stage, found in enumerate(kinds) if len(found) > 1]

    def all_reduce_seconds(self, first: int, end: int, num_bytes: float) -> float:
        """Return the seconds of all-reducing gradients over replicas, in each node and then between nodes."""
        numbers: dict[int, int] = {}
        for device in self.devices[first:end]:
            numbers[device.node] = numbers.get(device.node, 0) + device.number
        inside, between = max(numbers.values()), len(numbers)
        return (
            2 * (inside - 1) / inside * num_bytes / self.device_bytes_per_second
            + 2 * (between - 1) / between * num_bytes / self.node_bytes_per_second
        )


@dataclass(frozen=True, kw_only=True)
class ReplicatedCut:
    """A cut into stages of several devices.

    Args:
      counts: blocks of each stage.
      devices: devices of each stage, in their order; see `StageDevice.number`.
      step_seconds: seconds of the simulated schedule and the longest all-reduce of a stage.
      slowest_seconds: seconds of a microbatch in the slowest stage or link, which the cut minimises.
    """

    counts: tuple[int, ...]
    devices: tuple[int, ...]
    step_seconds: float
    slowest_seconds: float


@dataclass(frozen=True, kw_only=True)
class ReplicatedCosts:
    """Costs of the stages of a model, for any blocks and devices.

    Args:
      model: costs of the blocks, for a microbatch.
      gradient_bytes: bytes of the gradients of the blocks and of the model's ends.
      pipeline: the devices.
      num_microbatches: number of microbatches of a step.
      rows: rows of a microbatch.
    """

    model: ModelCosts
    gradient_bytes: Costs
    pipeline: PipelineDevices
    num_microbatches: int
    rows: int

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.model.blocks)

    def gradients(self, begin: int, end: int) -> float:
        """Return the bytes of the gradients of the blocks from `begin` to before `end`."""
        found = self.gradient_bytes
        ends = (begin == 0) * found.first + (end == self.num_blocks) * found.last
        return sum(found.blocks[begin:end]) + ends

    def list_block_costs(self, name: str) -> tuple[list[float], float, float]:
        """Return one cost of each block, of what comes before the blocks, and of what comes after them."""
        model = self.model
        return [getattr(block, name) for block in model.blocks], *(
            getattr(each, name) for each in (model.first, model.last)
        )

    def evaluate(self, counts: Sequence[int], devices: Sequence[int]) -> ReplicatedCut:
        """Predict the step of a cut; the slowest stage is infinite if the cut does not fit the memory."""
        blocks, groups = (list(pairwise(accumulate(each, initial=0))) for each in (counts, devices))
        costs = StageCosts(
            model=self.model,
            devices=[self.pipeline.stage(*group, self.rows) for group in groups],
            table=make_table("1f1b", len(groups), self.num_microbatches),
            link_bytes_per_second=[self.pipeline.link(end - 1, end) for _, end in groups[:-1]],
        )
        slowest = longest = 0.0
        for stage, (part, group) in enumerate(zip(blocks, groups, strict=True)):
            joined = self.pipeline.all_reduce_seconds(*group, self.gradients(*part))
            busy = costs.busy_seconds(stage, *part) + joined / self.num_microbatches
            fits = costs.memory_bytes(stage, *part) <= costs.devices[stage].memory_bytes
            slowest = max(slowest, busy if fits else math.inf, costs.transfer_seconds(part[0], stage))
            longest = max(longest, joined)
        return ReplicatedCut(
            counts=tuple(counts),
            devices=tuple(devices),
            step_seconds=costs.simulated(counts).makespan + longest,
            slowest_seconds=slowest,
        )


MOST_ENTRIES = 4_000_000
"""Largest number of stages to compare, over all blocks and devices."""

MICROBATCHES = 4
"""Largest number of microbatches for each possible stage."""


def list_pipeline_devices(
    plan: ClusterPlan, link_gb_per_second: float | None, num_blocks: int
) -> PipelineDevices:
    """Return the devices of a planned cluster, kind by kind; of many, several of a node count as one.

    The links are the slowest ones inside a node and between nodes or islands.

    Args:
      plan: the plan, with the devices and machine of each kind.
      link_gb_per_second: rate between islands. None means that sending takes no time.
      num_blocks: number of blocks of the model.
    """
    total = sum((each.kind.devices or 1) * each.kind.count for each in plan.kinds)
    most = max(math.isqrt(MOST_ENTRIES) // num_blocks, 1)
    devices, node = [], 0
    between = [] if link_gb_per_second is None or len(plan.shares) == 1 else [link_gb_per_second * GB]
    for each in plan.kinds:
        rates, of_island = each.machine.rates, each.kind.devices or 1
        per_node = min(each.machine.devices_per_node, of_island)
        # the smallest number that leaves few enough entries, or else the largest that divides a node
        together = divisors(math.gcd(per_node, of_island))
        number = next((n for n in together if total <= n * most), together[-1])
        for _ in range(each.kind.count):
            devices += [
                StageDevice(
                    flops_per_second=rates.flops_per_second,
                    memory_bytes=rates.memory_bytes,
                    node=node + i // per_node,
                    number=number,
                )
                for i in range(0, of_island, number)
            ]
            node = devices[-1].node + 1
        if of_island > per_node:
            between.append(each.machine.node_link.bytes_per_second)
    inside = min(each.machine.device_link.bytes_per_second for each in plan.kinds)
    return PipelineDevices(
        devices=tuple(devices),
        device_bytes_per_second=inside,
        node_bytes_per_second=min(between, default=inside),
    )


def pipeline_costs(subject: Subject, plan: ClusterPlan, link_gb_per_second: float | None) -> ReplicatedCosts:
    """Return the costs of the stages of a run's model on a planned cluster, with microbatches of equal rows.

    Args:
      subject: the model, its loss, optimizer and batch.
      plan, link_gb_per_second: see `list_pipeline_devices`.

    Raises:
      ValueError: the model does not define its blocks.
    """
    devices = list_pipeline_devices(plan, link_gb_per_second, subject.num_blocks)
    stages = min(len(devices.devices), subject.num_blocks)
    # equal rows, so that no batch is padded
    microbatches = max(n for n in divisors(subject.batch_rows) if n <= MICROBATCHES * stages)
    rows = subject.batch_rows // microbatches
    traced = subject.traced_blocks(rows)
    elements = traced.costs("params")
    return ReplicatedCosts(
        model=model_costs(traced, subject.optimizer.init),
        gradient_bytes=Costs(
            blocks=[GRADIENT_BYTES * each for each in elements.blocks],
            first=GRADIENT_BYTES * elements.first,
            last=GRADIENT_BYTES * elements.last,
        ),
        pipeline=devices,
        num_microbatches=microbatches,
        rows=rows,
    )
