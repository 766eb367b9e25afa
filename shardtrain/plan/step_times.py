"""The durations of a step's parts: tasks of its schedule, collectives, update. No jax.

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
    lockstep_table,
)
from shardtrain.plan.traffic import GRADIENT_BYTES

TICK_COPIES = 5
"""Copies of a stage's activations or cotangents in every tick of a pipeline: what arrives is put into a slot,
both ways; the task's input is read from its slot, or kept in one; what a task returns is handed on."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the parts of a step on one device.

    Args:
      num_stages: stages of the pipeline; 1: there is none.
      choice: the layout and the rest.
      num_blocks: blocks of the model.
      forward, backward: of the blocks of one part of the model, for one microbatch.
      ends: of what comes before and behind the blocks, forward and backward; in a pipeline only of the last
        part, for its loss.
      hop: to send activations to the next stage.
      collectives: all of a step, without what stages send.
      update: of the optimizer.
      again: of a pipeline, the forward of the blocks that each kind of backward computes again.
      first, first_backward: of a pipeline, of what comes before the blocks, in tasks of the first part.
      tick: of what every stage copies in each tick of a pipeline, whatever its tasks are.
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
        """The schedule; a single stage has one too."""
        choice = self.choice
        schedule = choice.schedule if self.num_stages > 1 else "1f1b"
        return lockstep_table(schedule, self.num_stages, choice.accumulate, choice.virtual_stages)

    @property
    def compute(self) -> float:
        """Seconds of computation of a step, of a stage on average."""
        if self.num_stages == 1:
            return self.choice.accumulate * (self.forward + self.backward + self.ends)
        table = self.table
        stages, chunks = range(table.num_stages), range(table.num_chunks)
        of_microbatch = sum(self.task(*each) for each in product(stages, chunks, table.kinds))
        return table.num_microbatches * of_microbatch / table.num_stages + self.of_ticks

    @property
    def of_ticks(self) -> float:
        """Seconds of what a stage copies in all ticks."""
        return self.table.num_ticks * self.tick if self.num_stages > 1 else 0.0

    @property
    def hops(self) -> float:
        """Seconds of what stages send in a tick: activations and cotangents over each of its distances."""
        distances = [distance for distance in self.table.part_placement.hops if distance]
        return 2 * len(distances) * self.hop

    @cached_property
    def per_compute(self) -> float:
        """1 / seconds of the tasks of a step, of a stage on average; 0 if nothing is computed."""
        seconds = self.compute - self.of_ticks
        return 1 / seconds if seconds else 0.0

    @property
    def in_microbatches(self) -> float:
        """Seconds of the collectives that are part of a microbatch."""
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

        In a pipeline each kind of backward computes the forward of its part again, so the forward of the last
        part, whose output only its own backward needs, is not run. What comes before the blocks is part of
        tasks of the first part, twice forward; the loss of the backward of the last.
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


def step_times(step: Step, machine: Machine) -> StepTimes:
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
    """Return the seconds of a microbatch that passes the whole model."""
    found = step.cost
    inside = [loop.seconds for loop in found.loops if loop.over == axes.LAYERS]
    # a model that is not one loop over its blocks and one back is not told apart
    forward, backward = inside if len(inside) == 2 else (0.0, 0.0)
    if len(inside) == 2:
        # what the forward stacks is for the backward
        backward += sum(loop.stacking_seconds for loop in found.loops if loop.over == axes.LAYERS)
    ends = found.seconds - forward - backward
    if step.choice.accumulate > 1:
        ends += sum(_adding_seconds(step, machine, each) for each in (True, False))
    return {"forward": forward, "backward": backward, "ends": ends}


def _time_parts(step: Step, machine: Machine) -> dict[str, float]:
    """Return the seconds of a microbatch in the tasks of a pipeline."""
    assert step.forward is not None
    _, again, loss, backward, behind = (each.seconds for each in step.cost.segments)
    of_blocks, of_rest = (_adding_seconds(step, machine, each) for each in (True, False))
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


def _adding_seconds(step: Step, machine: Machine, in_blocks: bool) -> float:
    """Return the seconds in which gradients of a microbatch are added to sums: two are read, one written."""
    kept = {axes.FSDP} if step.layout.zero != 3 else set[str]()
    num_bytes = sum(
        GRADIENT_BYTES * each.num_elements / math.prod(step.sizes.get(axis, 1) for axis in each.axes - kept)
        for each in step.state.weights
        if each.in_blocks == in_blocks
    )
    return float(machine.rates.seconds(0.0, 3 * num_bytes))
