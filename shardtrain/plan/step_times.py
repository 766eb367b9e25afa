"""The durations of a step's parts: tasks of its schedule, collectives, update. No jax.

`predict.py` adds them up; `simulator/step_graph.py` makes a task of each.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

from shardtrain import axes
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.table import Table
from shardtrain.plan.hlo.collectives import ALL_GATHER
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice, StateFigures
from shardtrain.plan.program_cost import Cost
from shardtrain.plan.traffic import parameter_traffic
from shardtrain.sharding.layout import Layout

START = "start"
"""Phase of collectives before the first microbatch: weights outside the blocks are gathered."""
MICROBATCH = "microbatch"
"""Phase of collectives that a microbatch waits for: activations, and gathered weights of blocks."""
MICROBATCH_GRADIENT = "gradient of a microbatch"
"""Phase of collectives by which the gradient of a block is summed in each microbatch."""
GRADIENT = "gradient"
"""Phase of collectives by which the gradient of the step is summed."""
UPDATED = "updated"
"""Phase of collectives after the optimizer: updated parameters are gathered."""


INSIDE, BETWEEN = "link inside nodes", "link between nodes"
"""The links of a machine."""


class Collective(NamedTuple):
    """Collectives of one kind in a step of one device.

    Args:
      kind: as in `plan.hlo.collectives`.
      axes: the mesh axes that they run over.
      phase: when they run, one of the phases of this module.
      sent_seconds: in which bytes are sent, all together.
      latency_seconds: of all messages.
      link: the link that limits them, `INSIDE` or `BETWEEN` nodes.
      of_blocks: the part of the bytes that is of parameters in the blocks, 0 to 1.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    sent_seconds: float
    latency_seconds: float
    link: str
    of_blocks: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all together."""
        return self.sent_seconds + self.latency_seconds


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the parts of a step on one device.

    Args:
      num_stages: stages of the pipeline; 1: there is none.
      choice: the layout and the rest.
      num_blocks: blocks of the model.
      forward, backward: of the blocks of one part of the model, for one microbatch.
      ends: of what comes before and behind the blocks, forward and backward.
      hop: to send activations to the next stage.
      collectives: all of a step, without what stages send.
      update: of the optimizer.
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

    @property
    def table(self) -> Table:
        """The schedule; a single stage has one too."""
        choice = self.choice
        schedule = choice.schedule if self.num_stages > 1 else "1f1b"
        return _table(schedule, self.num_stages, choice.accumulate, choice.virtual_stages)

    @property
    def compute(self) -> float:
        """Seconds of computation of a step, of a stage on average."""
        if self.num_stages == 1:
            return self.choice.accumulate * (self.forward + self.backward + self.ends)
        table = self.table
        stages, chunks = range(table.num_stages), range(table.num_chunks)
        of_microbatch = sum(self.task(*each) for each in product(stages, chunks, table.kinds))
        return table.num_microbatches * of_microbatch / table.num_stages

    @cached_property
    def per_compute(self) -> float:
        """1 / seconds of computation; 0 if nothing is computed."""
        return 1 / self.compute if self.compute else 0.0

    @property
    def in_microbatches(self) -> float:
        """Seconds of the collectives that are part of a microbatch."""
        return sum(
            each.seconds for each in self.collectives if each.phase in (MICROBATCH, MICROBATCH_GRADIENT)
        )

    def task(self, stage: int, chunk: int, kind: str) -> float:
        """Return the seconds of a task of the table.

        In a pipeline each kind of backward computes the forward of its part again; what comes before and
        behind the blocks is counted where the loss is.
        """
        if kind == "forward":
            return self.forward
        if self.num_stages == 1:
            return self.backward + self.ends
        table = self.table
        is_last = table.part_placement.part(stage, chunk) == table.num_parts - 1
        return self.forward + (self.backward + self.ends * is_last) / (len(table.kinds) - 1)


def step_times(
    found: Cost,
    state: StateFigures,
    layout: Layout,
    sizes: Mapping[str, int],
    choice: Choice,
    machine: Machine,
) -> StepTimes:
    """Return the durations of a step's parts.

    Args:
      found: the cost of one microbatch of one chunk.
      state: of the state's specs.
      layout: completed for the model.
      sizes: axis -> size.
      choice: the layout and the rest.
      machine: where it runs.
    """
    inside = [loop.seconds for loop in found.loops if loop.over == axes.LAYERS]
    # a model that is not one loop over its blocks and one back is not told apart
    forward, backward = inside if len(inside) == 2 else (0.0, 0.0)
    link = machine.link((axes.PIPELINE,), sizes)
    return StepTimes(
        num_stages=sizes[axes.PIPELINE],
        choice=choice,
        num_blocks=state.num_blocks,
        forward=forward,
        backward=backward,
        ends=found.seconds - forward - backward,
        hop=link.latency_seconds + stream_bytes(found) / link.bytes_per_second,
        collectives=(
            *_of_parameters(state, layout, sizes, choice, machine),
            *_of_activations(found, sizes, choice, machine),
        ),
        update=float(machine.rates.seconds(0.0, 3 * state.updated + 2 * state.optimizer)),
    )


def stream_bytes(found: Cost) -> float:
    """Return the bytes that one block hands to the next, of one microbatch on one device."""
    return next((loop.carried_bytes for loop in found.loops if loop.over == axes.LAYERS), 0.0)


@cache
def _table(schedule: str, stages: int, microbatches: int, chunks: int) -> Table:
    return make_table(schedule, stages, microbatches, chunks, lockstep=True)


def _of_parameters(
    state: StateFigures, layout: Layout, sizes: Mapping[str, int], choice: Choice, machine: Machine
) -> Iterator[Collective]:
    gathers = 1 if choice.remat == "none" else 2
    options = (layout, sizes, choice.accumulate, state.item_bytes, gathers)
    in_blocks = parameter_traffic(tuple(each for each in state.weights if each.in_blocks), *options)
    for key, sent in parameter_traffic(state.weights, *options).items():
        link, members = machine.link(key.axes, sizes), math.prod(sizes[axis] for axis in key.axes)
        # what is gathered in a block is sent block by block, everything else at once
        times = choice.accumulate * state.num_blocks if key.in_blocks else 1
        if key.in_blocks:
            phase = MICROBATCH if key.kind == ALL_GATHER else MICROBATCH_GRADIENT
        elif key.kind == ALL_GATHER:
            phase = START if layout.zero == 3 else UPDATED
        else:
            phase = GRADIENT
        yield Collective(
            kind=key.kind,
            axes=key.axes,
            phase=phase,
            sent_seconds=sent / link.bytes_per_second,
            latency_seconds=times * (members - 1) * link.latency_seconds,
            link=_link(key.axes, sizes, machine),
            of_blocks=in_blocks.get(key, 0.0) / sent,
        )


def _of_activations(
    found: Cost, sizes: Mapping[str, int], choice: Choice, machine: Machine
) -> Iterator[Collective]:
    runs = choice.accumulate * choice.virtual_stages
    sums: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for each in found.sent:
        over = tuple(axis for axis in each.axes if sizes.get(axis, 1) > 1)
        seconds = runs * machine.collective_seconds(each.kind, over, sizes, each.num_bytes, each.times)
        latency = runs * machine.collective_seconds(each.kind, over, sizes, 0.0, each.times)
        before = sums.get((each.kind, over), (0.0, 0.0))
        sums[each.kind, over] = (before[0] + seconds - latency, before[1] + latency)
    for (kind, over), (sent, latency) in sums.items():
        if sent + latency:
            yield Collective(kind, over, MICROBATCH, sent, latency, _link(over, sizes, machine))


def _link(over: tuple[str, ...], sizes: Mapping[str, int], machine: Machine) -> str:
    return INSIDE if machine.link(over, sizes) == machine.device_link else BETWEEN
