"""The bytes that a device sends in a predicted step, by mesh axes. No jax."""

import math

from shardtrain import axes
from shardtrain.pipeline.schedule import make_table
from shardtrain.plan.stage_runs import block_gathers, sent_activations
from shardtrain.plan.step_times import stream_bytes
from shardtrain.plan.steps import Step
from shardtrain.plan.traffic import parameter_traffic, sent_bytes


def sent_by_axes(step: Step, *, simulated: bool = False) -> dict[tuple[str, ...], float]:
    """Return mesh axes, slowest first -> bytes that a device sends in a step, by ring collectives.

    Stages of a pipeline send in every tick of its schedule, both ways.

    Args:
      step: what the choice is predicted from.
      simulated: whether the devices are those of XLA for CPU, whose programs reduce the gradients of a table
        that is used twice one by one.
    """
    choice, sizes, state = step.choice, step.sizes, step.state.figures
    found: dict[tuple[str, ...], float] = {}

    def add(over: tuple[str, ...], num_bytes: float) -> None:
        members = tuple(axis for axis in axes.AXES if axis in over and sizes.get(axis, 1) > 1)
        if members and num_bytes:
            found[members] = found.get(members, 0.0) + num_bytes

    traffic = parameter_traffic(
        state.weights,
        step.state.layout,
        sizes,
        choice.accumulate,
        state.item_bytes,
        block_gathers(sizes, choice),
        sums_apart=simulated,
    )
    for key, num_bytes in traffic.items():
        # the traced program completes sums over positions itself
        if axes.CONTEXT not in key.axes:
            add(key.axes, num_bytes)
    for each in sent_activations(step.cost, step.forward, sizes, choice):
        members = math.prod(sizes.get(axis, 1) for axis in each.axes)
        add(each.axes, sent_bytes(each.kind, members, each.num_bytes))
    stages = sizes[axes.PIPELINE]
    if stages > 1:
        table = make_table(choice.schedule, stages, choice.accumulate, choice.virtual_stages, lockstep=True)
        # the last stage sends nothing forward, the first nothing backward
        add((axes.PIPELINE,), 2 * table.num_ticks * stream_bytes(step.cost) * (stages - 1) / stages)
    return found
