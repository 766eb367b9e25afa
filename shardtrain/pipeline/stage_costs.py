"""Estimate the seconds and bytes of a group of blocks on a stage of given speed and memory. No jax.

Next: `stage_cut.py`, which cuts a model by these costs; `block_costs.py`, which traces them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from shardtrain.errors.messages import refuse
from shardtrain.pipeline.simulate import SimulatedTimes, simulate
from shardtrain.pipeline.table import Table


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """The costs of one block, for one microbatch; each a number from 0.

    Args:
      forward_flops: floating-point operations of its forward.
      backward_flops: floating-point operations of its backward, without recomputing the forward.
      state_bytes: its parameters, their gradients and their optimizer state.
      saved_bytes: the activations that its backward reads.
      deferred_bytes: what its backward keeps for its weight task, if the schedule has weight tasks.
      output_bytes: the activations that it returns to the next block.
    """

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0
    deferred_bytes: float = 0.0
    output_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The costs of a model's blocks, and of its layers before and after them.

    Args:
      blocks: the cost of each block, in order.
      first: the cost of the layers before the blocks, such as an embedding; on the first stage.
      last: the cost of the layers after the blocks, such as a head; on the last stage.
    """

    blocks: Sequence[BlockCost]
    first: BlockCost = field(default_factory=BlockCost)
    last: BlockCost = field(default_factory=BlockCost)


@dataclass(frozen=True, kw_only=True)
class StageDevices:
    """The devices of one stage.

    Args:
      flops_per_second: the sum over its devices; or a speed in any unit, the same for all stages.
      memory_bytes: the memory of each device; infinite means no limit.
      state_shards: number of devices over which parameters, gradients and optimizer state are sharded.
      row_shards: number of devices over which the rows of a microbatch are sharded.
    """

    flops_per_second: float
    memory_bytes: float = math.inf
    state_shards: int = 1
    row_shards: int = 1


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """The costs of blocks on the stages of a pipeline, under a schedule.

    A stage keeps only the input of each live microbatch, and recomputes its forward in the backward.

    Args:
      model: the costs of its blocks.
      devices: the devices of each stage, in order.
      table: the schedule, with one part a stage, not in lock-step.
      link_bytes_per_second: bandwidth between each stage and the next, or one number for all.

    Raises:
      ValueError: the schedule has several parts a stage, there are fewer blocks than stages, or a stage has
        no speed.
    """

    model: ModelCosts
    devices: Sequence[StageDevices]
    table: Table
    link_bytes_per_second: float | Sequence[float] = math.inf

    def __post_init__(self) -> None:
        stages, table, links = len(self.devices), self.table, self.link_bytes_per_second
        assert table.num_stages == stages
        assert isinstance(links, int | float) or len(links) == stages - 1
        problems = []
        if table.num_chunks != 1 or table.lockstep:
            problems.append(
                f"the schedule {table.name!r} has {table.num_chunks} chunks a stage"
                f"{' in lock-step' if table.lockstep else ''}; cut by time needs one part a stage, not in"
                " lock-step: use 1f1b, zero_bubble or gpipe with one virtual stage, or numbers of blocks"
            )
        if self.num_blocks < stages:
            problems.append(f"each stage has one block or more; use at most {self.num_blocks} stages")
        problems += [
            f"the speed of stage {stage} is {each.flops_per_second}; use one above 0"
            for stage, each in enumerate(self.devices)
            if not 0 < each.flops_per_second < math.inf
        ]
        refuse(f"{self.num_blocks} blocks cannot be cut for {stages} stages by time", problems)

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.model.blocks)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.devices)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """For each stage, the largest number of microbatches in flight."""
        return tuple(map(self.table.live, range(self.num_stages)))

    @cached_property
    def delayed_weights(self) -> tuple[int, ...]:
        """For each stage, the largest number of microbatches between their backward and their weight task."""
        return tuple(map(self.table.delayed_weights, range(self.num_stages)))

    @cached_property
    def _sums(self) -> Mapping[str, Sequence[float]]:
        names = ("forward_flops", "backward_flops", "state_bytes", "saved_bytes", "deferred_bytes")
        return {
            name: list(accumulate((getattr(block, name) for block in self.model.blocks), initial=0.0))
            for name in names
        }

    def _sum(self, name: str, stage: int, begin: int, end: int) -> float:
        """Add up a cost over the blocks from begin to end, and the model's ends that are on this stage."""
        sums = self._sums[name]
        found = sums[end] - sums[begin]
        found += getattr(self.model.first, name) if stage == 0 else 0.0
        return found + (getattr(self.model.last, name) if stage == self.num_stages - 1 else 0.0)

    def seconds(self, stage: int, begin: int, end: int) -> dict[str, float]:
        """Return the seconds of each kind of task, for one microbatch.

        Args:
          stage: the number of the stage.
          begin, end: its first block, and the block after its last.
        """
        speed = self.devices[stage].flops_per_second
        forward = self._sum("forward_flops", stage, begin, end) / speed
        backward = self._sum("backward_flops", stage, begin, end) / speed
        first, last = stage == 0, stage == self.num_stages - 1
        # every backward computes the forward again, so the last stage needs no forward of its own
        ahead = 0.0 if last else forward
        if not self.table.has_weight:
            return {"forward": ahead, "backward": forward + backward}
        # the first stage sends no cotangents: its whole backward is its weight task, except for the loss
        cotangents = 0.0 if first else backward / 2
        to_input = 0.0 if first and not last else forward + cotangents
        return {"forward": ahead, "backward": to_input, "weight": forward + backward - to_input}

    def busy_seconds(self, stage: int, begin: int, end: int) -> float:
        """Return the seconds of all tasks of a stage, for one microbatch."""
        return sum(self.seconds(stage, begin, end).values())

    def transfer_seconds(self, boundary: int, stage: int) -> float:
        """Return the seconds to send a microbatch's activations from the previous stage to this one.

        Args:
          boundary: the first block of this stage.
          stage: its number; the first stage receives nothing.
        """
        if stage == 0:
            return 0.0
        links = self.link_bytes_per_second
        link = links if isinstance(links, int | float) else links[stage - 1]
        return self.model.blocks[boundary - 1].output_bytes / link

    def memory_bytes(self, stage: int, begin: int, end: int) -> float:
        """Return the bytes that each device needs: state, activations in flight, deferred gradients.

        With weight tasks, the cotangents of the stage's outputs, and what its backward has computed for them,
        are kept from the backward of a microbatch to its weight task.
        """
        devices = self.devices[stage]
        saved = self._sum("saved_bytes", stage, begin, end)
        before = self.model.blocks[begin - 1] if begin else BlockCost()
        activations = self.live[stage] * before.output_bytes + saved
        if stage < self.num_stages - 1:
            activations += self.delayed_weights[stage] * self.model.blocks[end - 1].output_bytes
        if stage > 0:
            activations += self.delayed_weights[stage] * self._sum("deferred_bytes", stage, begin, end)
        state = self.state_bytes(stage, begin, end)
        return state / devices.state_shards + activations / devices.row_shards

    def state_bytes(self, stage: int, begin: int, end: int) -> float:
        """Return the bytes of parameters, gradients and optimizer state on all devices of a stage."""
        return self._sum("state_bytes", stage, begin, end)

    def simulated(self, counts: Sequence[int]) -> SimulatedTimes:
        """Simulate the schedule with these numbers of blocks."""
        ends = list(accumulate(counts))
        begins = [0, *ends[:-1]]
        times = {
            (stage, 0, kind): seconds
            for stage, (begin, end) in enumerate(zip(begins, ends, strict=True))
            for kind, seconds in self.seconds(stage, begin, end).items()
        }

        def transfer(part: int, to: int, kind: str) -> float:
            later = max(part, to)
            return self.transfer_seconds(begins[later], later)

        return simulate(self.table, times, transfer)
