"""The bytes that a device sends in a predicted step, by mesh axes. No jax."""

import math

from shardtrain import axes
from shardtrain.pipeline.schedule import make_table
from shardtrain.plan.step_times import stream_bytes
from shardtrain.plan.steps import Step
from shardtrain.plan.traffic import parameter_traffic, sent_bytes


def sent_by_axes(step: Step) -> dict[tuple[str, ...], float]:
    """Return mesh axes, slowest first -> bytes that a device sends in a step, by ring collectives.

    Stages of a pipeline send in every tick of its schedule, both ways.

    Args:
      step: what the choice is predicted from.
    """
    choice, sizes, state = step.choice, step.sizes, step.state.figures
    found: dict[tuple[str, ...], float] = {}

    def add(over: tuple[str, ...], num_bytes: float) -> None:
        members = tuple(axis for axis in axes.AXES if axis in over and sizes.get(axis, 1) > 1)
        if members and num_bytes:
            found[members] = found.get(members, 0.0) + num_bytes

    gathers = 1 if choice.remat == "none" else 2
    traffic = parameter_traffic(
        state.weights, step.state.layout, sizes, choice.accumulate, state.item_bytes, gathers
    )
    for key, num_bytes in traffic.items():
        add(key.axes, num_bytes)
    runs = choice.accumulate * choice.virtual_stages
    for each in step.cost.sent:
        members = math.prod(sizes.get(axis, 1) for axis in each.axes)
        add(each.axes, runs * sent_bytes(each.kind, members, each.num_bytes))
    stages = sizes[axes.PIPELINE]
    if stages > 1:
        table = make_table(choice.schedule, stages, choice.accumulate, choice.virtual_stages, lockstep=True)
        # the last stage sends nothing forward, the first nothing backward
        add((axes.PIPELINE,), 2 * table.num_ticks * stream_bytes(step.cost) * (stages - 1) / stages)
    return found
