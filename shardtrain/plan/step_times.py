"""Compute the durations of the parts of a step: tasks of its schedule, collectives, update. No jax.

`predict.py` adds them up; `simulator/step_graph.py` makes a task of each.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from shardtrain import axes
from shardtrain.pipeline.table import Table
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice, Step
from shardtrain.plan.step_collectives import (
    MICROBATCH,
    MICROBATCH_GRADIENT,
    Collective,
    list_activation_collectives,
    list_parameter_collectives,
    make_lockstep_table,
)
from shardtrain.plan.traffic import GRADIENT_BYTES

TICK_COPIES = 5
"""Copies of a stage's activations or cotangents in every tick of a pipeline: arrivals from both directions go
into slots, the task's input is read from a slot and kept in one, and its result is copied to be sent."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the parts of a step on one device.

    Args:
      num_stages: number of stages of the pipeline; 1 without a pipeline.
      choice: the choice of the step.
      num_blocks: number of blocks of the model.
      forward, backward: of the blocks of one part of the model, for one microbatch.
      ends: of the operations before and after the blocks, forward and backward; in a pipeline, only of the
        loss in the last part.
      hop: of sending activations to the next stage.
      collectives: all collectives of a step, without what stages send.
      update: of the optimizer.
      again: in a pipeline, of the forward of the blocks that each kind of backward recomputes.
      first, first_backward: in a pipeline, of the operations before the blocks, in tasks of the first part.
      tick: in a pipeline, of the copies of every stage in each tick.
    """

    num_stages: int
    choice: Choice
    num_blocks: int
    forward: float
    backward: float
    ends: float
    hop: float
    collectives: tuple[Collective, ...]
    update: float
    again: float = 0.0
    first: float = 0.0
    first_backward: float = 0.0
    tick: float = 0.0

    @property
    def table(self) -> Table:
        """The schedule, also of a single stage."""
        choice = self.choice
        schedule = choice.schedule if self.num_stages > 1 else "1f1b"
        return make_lockstep_table(schedule, self.num_stages, choice.accumulate, choice.virtual_stages)

    @property
    def compute(self) -> float:
        """Seconds of computation of a step, averaged over stages."""
        if self.num_stages == 1:
            return self.choice.accumulate * (self.forward + self.backward + self.ends)
        table = self.table
        stages, chunks = range(table.num_stages), range(table.num_chunks)
        of_microbatch = sum(self.task(*each) for each in product(stages, chunks, table.kinds))
        return table.num_microbatches * of_microbatch / table.num_stages + self.of_ticks

    @property
    def of_ticks(self) -> float:
        """Seconds of the copies of a stage in all ticks."""
        return self.table.num_ticks * self.tick if self.num_stages > 1 else 0.0

    @property
    def hops(self) -> float:
        """Seconds of sending activations and cotangents in a tick, over each of its distances."""
        distances = [distance for distance in self.table.part_placement.hops if distance]
        return 2 * len(distances) * self.hop

    @cached_property
    def per_compute(self) -> float:
        """1 / seconds of the tasks of a step, averaged over stages; 0 if nothing is computed."""
        seconds = self.compute - self.of_ticks
        return 1 / seconds if seconds else 0.0

    @property
    def in_microbatches(self) -> float:
        """Seconds of the collectives that run in microbatches."""
        return sum(
            each.seconds for each in self.collectives if each.phase in (MICROBATCH, MICROBATCH_GRADIENT)
        )

    def outside(self, part: int, kind: str) -> float:
        """Return the seconds that a task of a part of a pipeline spends outside the blocks."""
        is_first, is_last = part == 0, part == self.table.num_parts - 1
        if kind == "forward":
            return self.first * is_first
        return (self.first_backward * is_first + self.ends * is_last) * (kind == "backward")

    def task(self, stage: int, chunk: int, kind: str) -> float:
        """Return the seconds of a task of the table.

        In a pipeline, each kind of backward recomputes the forward of its part, so the last part has no
        forward task. Tasks of the first part include the operations before the blocks; the backward of the
        last part includes the loss.
        """
        if self.num_stages == 1:
            return self.forward if kind == "forward" else self.backward + self.ends
        table = self.table
        part = table.part_placement.part(stage, chunk)
        of_blocks = (
            self.forward * (part < table.num_parts - 1)
            if kind == "forward"
            else self.again + self.backward / (len(table.kinds) - 1)
        )
        return of_blocks + self.outside(part, kind)


def compute_step_times(step: Step, machine: Machine) -> StepTimes:
    """Return the durations of a step's parts on a machine."""
    link, state = machine.link((axes.PIPELINE,), step.sizes), step.state
    computed = _time_whole if step.forward is None or step.num_stages == 1 else _time_parts
    return StepTimes(
        num_stages=step.num_stages,
        choice=step.choice,
        num_blocks=state.num_blocks,
        **computed(step, machine),
        hop=link.latency_seconds + step.stream_bytes / link.bytes_per_second,
        collectives=(*list_parameter_collectives(step, machine), *list_activation_collectives(step, machine)),
        update=float(machine.rates.seconds(0.0, 3 * state.updated + 2 * state.optimizer)),
    )


def _time_whole(step: Step, machine: Machine) -> dict[str, float]:
    """Return the seconds of a microbatch without a pipeline."""
    found = step.cost
    inside = [loop.seconds for loop in found.loops if loop.over == axes.LAYERS]
    # a model that is not one loop over its blocks, forward and backward, counts as ends
    forward, backward = inside if len(inside) == 2 else (0.0, 0.0)
    if len(inside) == 2:
        # the forward stacks arrays for the backward
        backward += sum(loop.stacking_seconds for loop in found.loops if loop.over == axes.LAYERS)
    ends = found.seconds - forward - backward
    if step.choice.accumulate > 1:
        ends += sum(_time_additions(step, machine, each) for each in (True, False))
    return {"forward": forward, "backward": backward, "ends": ends}


def _time_parts(step: Step, machine: Machine) -> dict[str, float]:
    """Return the seconds of a microbatch in the tasks of a pipeline."""
    assert step.forward is not None
    _, again, loss, backward, behind = (each.seconds for each in step.cost.segments)
    of_blocks, of_rest = (_time_additions(step, machine, each) for each in (True, False))
    moved = 2 * TICK_COPIES * step.stream_bytes
    return {
        "forward": step.forward.segments[1].seconds,
        "again": again,
        "backward": backward + of_blocks,
        "ends": loss + of_rest,
        "first": step.forward.segments[0].seconds,
        "first_backward": behind + of_rest,
        "tick": float(machine.rates.seconds(0.0, moved)) + (TICK_COPIES - 1) * machine.rates.kernel_seconds,
    }


def _time_additions(step: Step, machine: Machine, in_blocks: bool) -> float:
    """Return the seconds of adding the gradients of a microbatch to sums: two reads and one write."""
    kept = {axes.FSDP} if step.layout.zero != 3 else set[str]()
    num_bytes = sum(
        GRADIENT_BYTES * each.num_elements / math.prod(step.sizes.get(axis, 1) for axis in each.axes - kept)
        for each in step.state.weights
        if each.in_blocks == in_blocks
    )
    return float(machine.rates.seconds(0.0, 3 * num_bytes))
