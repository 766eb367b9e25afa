"""List the collectives of a step with their seconds: of parameters, gradients and activations. No jax.

Next: `step_times.py`, the durations of all other parts of a step.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from shardtrain import axes
from shardtrain.functional.remat_counts import find_remat_part
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.table import Table
from shardtrain.plan.hlo.collectives import ALL_GATHER
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice, Segment, SentCollective, Step
from shardtrain.plan.traffic import StepSizes, Traffic, parameter_traffic


@cache
def make_lockstep_table(schedule: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Return the table of a schedule as a mesh runs it."""
    return make_table(schedule, stages, microbatches, chunks, lockstep=True)


def list_stage_runs(step: Step) -> list[tuple[float, Segment]]:
    """Return (runs in a step, segment) for each segment of the traced program, averaged over stages."""
    runs, parts = step.choice.accumulate * step.choice.virtual_stages, step.num_parts
    if step.forward is None or step.num_stages == 1:
        return [(runs, each) for each in step.cost.segments]
    _, again, loss, backward, behind = step.cost.segments
    first, forward = step.forward.segments[:2]
    # the last part has no separate forward; each kind of backward recomputes the forward; segments outside
    # the blocks run in the first or the last part. A lookup is not recomputed for its gradient
    return [
        (runs * (parts - 1) / parts, forward),
        (runs * count_backwards(step.choice), again),
        (runs, backward),
        *((runs / parts, each) for each in (first, loss, behind)),
    ]


def list_sent_activations(step: Step) -> tuple[SentCollective, ...]:
    """List the collectives of activations of a step."""
    return tuple(
        each._replace(num_bytes=times * each.num_bytes, times=times * each.times)
        for times, segment in list_stage_runs(step)
        for each in segment.sent
    )


def count_sent_parameters(step: Step, *, sums_apart: bool, only_blocks: bool = False) -> Traffic:
    """Return the bytes that a device sends for parameters and gradients, see `parameter_traffic`."""
    weights = tuple(each for each in step.state.weights if each.in_blocks or not only_blocks)
    work = StepSizes(
        weights=weights,
        microbatches=step.choice.accumulate,
        compute_bytes=step.state.item_bytes,
        block_gathers=count_block_gathers(step),
        sums_apart=sums_apart,
    )
    found = parameter_traffic(work, step.layout.zero, step.sizes)
    # the traced program contains the sums over positions
    return {key: sent for key, sent in found.items() if axes.CONTEXT not in key.axes}


def count_backwards(choice: Choice) -> int:
    """Return the number of kinds of backward tasks of a pipeline's schedule."""
    table = make_lockstep_table(choice.schedule, 2, 2 * choice.virtual_stages, choice.virtual_stages)
    return len(table.kinds) - 1


def count_block_gathers(step: Step) -> float:
    """Return how often a microbatch gathers the weights of a block, averaged over stages."""
    of_backward = 1 - find_remat_part(step.choice.remat, "none")
    if step.num_stages == 1:
        return 1 + of_backward
    # forward tasks except in the last part, and each backward, which recomputes its forward
    parts = step.num_parts
    return (parts - 1) / parts + count_backwards(step.choice) * (1 + of_backward)


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


class Collective(NamedTuple):
    """Collectives of one kind in a step of one device.

    Args:
      kind: as in `plan.hlo.collectives`.
      axes: the mesh axes that they run over.
      phase: when they run, one of the phases of this module.
      sent_seconds: seconds of sending their bytes.
      latency_seconds: latency of all messages.
      link: the link that limits them, `machine.INSIDE` or `machine.BETWEEN`.
      of_blocks: fraction of the bytes that belongs to parameters in the blocks.
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
        """Seconds of sending and latency."""
        return self.sent_seconds + self.latency_seconds


def list_parameter_collectives(step: Step, machine: Machine) -> Iterator[Collective]:
    """Yield the collectives of parameters and gradients."""
    sizes, apart = step.sizes, machine.simulated
    in_blocks = count_sent_parameters(step, sums_apart=apart, only_blocks=True)
    for key, sent in count_sent_parameters(step, sums_apart=apart).items():
        link, members = machine.link(key.axes, sizes), math.prod(sizes[axis] for axis in key.axes)
        # collectives in blocks send one message for each block
        times = step.choice.accumulate * step.state.num_blocks if key.in_blocks else 1
        if key.in_blocks:
            phase = MICROBATCH if key.kind == ALL_GATHER else MICROBATCH_GRADIENT
        elif key.kind == ALL_GATHER:
            phase = START if step.layout.zero == 3 else UPDATED
        else:
            phase = GRADIENT
        yield Collective(
            kind=key.kind,
            axes=key.axes,
            phase=phase,
            sent_seconds=sent / link.bytes_per_second,
            latency_seconds=times * (members - 1) * link.latency_seconds,
            link=machine.find_link_name(key.axes, sizes),
            of_blocks=in_blocks.get(key, 0.0) / sent,
        )


def list_activation_collectives(step: Step, machine: Machine) -> Iterator[Collective]:
    """Yield the collectives of activations."""
    sizes = step.sizes
    sums: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for each in list_sent_activations(step):
        over = tuple(axis for axis in each.axes if sizes.get(axis, 1) > 1)
        seconds = machine.collective_seconds(each.kind, over, sizes, each.num_bytes, each.times)
        latency = machine.collective_seconds(each.kind, over, sizes, 0.0, each.times)
        before = sums.get((each.kind, over), (0.0, 0.0))
        sums[each.kind, over] = (before[0] + seconds - latency, before[1] + latency)
    for (kind, over), (sent, latency) in sums.items():
        if sent + latency:
            yield Collective(kind, over, MICROBATCH, sent, latency, machine.find_link_name(over, sizes))
