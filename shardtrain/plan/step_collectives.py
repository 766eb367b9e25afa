"""The collectives of a step and how long they take: of parameters, gradients and activations. No jax.

Next: `step_times.py`, the durations of everything else.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.cost import Sent
from shardtrain.plan.hlo.collectives import ALL_GATHER
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice, StateFigures
from shardtrain.plan.stage_runs import block_gathers
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


def of_parameters(
    state: StateFigures, layout: Layout, sizes: Mapping[str, int], choice: Choice, machine: Machine
) -> Iterator[Collective]:
    """Yield the collectives of parameters and gradients."""
    options = (layout, sizes, choice.accumulate, state.item_bytes, block_gathers(sizes, choice))
    apart = machine.simulated
    of_blocks = tuple(each for each in state.weights if each.in_blocks)
    in_blocks = parameter_traffic(of_blocks, *options, sums_apart=apart)
    for key, sent in parameter_traffic(state.weights, *options, sums_apart=apart).items():
        if axes.CONTEXT in key.axes:
            continue  # the traced program completes sums over positions itself
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


def of_activations(found: Sequence[Sent], sizes: Mapping[str, int], machine: Machine) -> Iterator[Collective]:
    """Yield the collectives of activations that a step sends."""
    sums: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for each in found:
        over = tuple(axis for axis in each.axes if sizes.get(axis, 1) > 1)
        seconds = machine.collective_seconds(each.kind, over, sizes, each.num_bytes, each.times)
        latency = machine.collective_seconds(each.kind, over, sizes, 0.0, each.times)
        before = sums.get((each.kind, over), (0.0, 0.0))
        sums[each.kind, over] = (before[0] + seconds - latency, before[1] + latency)
    for (kind, over), (sent, latency) in sums.items():
        if sent + latency:
            yield Collective(kind, over, MICROBATCH, sent, latency, _link(over, sizes, machine))


def _link(over: tuple[str, ...], sizes: Mapping[str, int], machine: Machine) -> str:
    return INSIDE if machine.link(over, sizes) == machine.device_link else BETWEEN
