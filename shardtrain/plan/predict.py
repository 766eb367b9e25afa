"""Predict a training step in a layout: memory of a device by component, and seconds by part. No devices.

It adds up the traced program of loss and gradient (`program_cost.py`), the state by its specs, and the times
of tasks and collectives (`step_times.py`). Next: `search.py`, which compares layouts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from shardtrain import axes
from shardtrain.data.row_split import RowSplit
from shardtrain.pipeline.simulate import simulate
from shardtrain.pipeline.table import Table
from shardtrain.pipeline.tick_arrays import make_ticks
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice, Cost, Memory, Prediction, Seconds, Step
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS, Sharding
from shardtrain.plan.step_collectives import (
    count_sent_parameters,
    list_sent_activations,
    list_stage_runs,
    make_lockstep_table,
)
from shardtrain.plan.step_times import StepTimes, compute_step_times
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import Exchange
from shardtrain.plan.traffic import count_sent_bytes
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout

ROWS, PARTS, ARRIVED_ROWS = "rows", "parts", "arrived rows"
"""Names of splits of a step that are not one mesh axis: of its rows into microbatches on devices, of the
blocks into parts of a pipeline, and of the rows that devices of the axis expert receive."""


def find_sharding(
    layout: Layout, sizes: Mapping[str, int], accumulate: int, chunks: int = 1, fraction: float = 1.0
) -> Sharding:
    """Return how a layout splits the arrays of a traced program, for one microbatch of one chunk.

    Args:
      layout: the layout, completed for the model, see `Specs.layout`.
      sizes: axis -> size.
      accumulate: number of microbatches.
      chunks: parts of the model on each stage of a pipeline.
      fraction: rows of this island, as a fraction of the program's rows.
    """
    rows = math.prod(sizes[axis] for axis in layout.batch_axes) * accumulate / fraction
    of_stages = sizes[axes.PIPELINE] * chunks
    all_sizes = {**sizes, ROWS: rows, PARTS: of_stages, ARRIVED_ROWS: rows / sizes[axes.EXPERT]}
    activations = {
        **layout.activation_rules,
        axes.BATCH: (ROWS,),
        axes.LAYERS: (PARTS,),
        ARRIVED: (ARRIVED_ROWS,),
        ARRIVED_TOKENS: (ARRIVED_ROWS, *layout.activation_rules.get(axes.SEQ, ())),
        EXPERT_SLOTS: (axes.EXPERT, ARRIVED_ROWS),
    }

    def split(rules: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        present = {dim: tuple(axis for axis in over if all_sizes[axis] != 1) for dim, over in rules.items()}
        return tuple(sorted((dim, over) for dim, over in present.items() if over))

    found, of_parameters = split(activations), split(layout.parameter_rules)
    used = {axis for _, over in (*found, *of_parameters) for axis in over}
    return Sharding(found, of_parameters, tuple(sorted((axis, all_sizes[axis]) for axis in used)))


def steps(subject: Subject, machine: Machine, num_devices: int, choices: Sequence[Choice]) -> list[Step]:
    """Return the inputs of the predictions of several choices.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: number of devices.
      choices: the choices.

    Raises:
      ValueError: a layout does not fit the model.
    """
    sizes = [axis_sizes(choice.layout.mesh, num_devices) for choice in choices]
    states = [subject.state(choice, num_devices) for choice in choices]
    rows = [
        subject.rows_of(RowSplit.of(each, choice.layout.batch_axes, choice.accumulate))
        for choice, each in zip(choices, sizes, strict=True)
    ]
    shardings = [
        find_sharding(
            state.layout, each, choice.accumulate, choice.virtual_stages, num_rows / subject.traced_rows
        )
        for choice, each, state, num_rows in zip(choices, sizes, states, rows, strict=True)
    ]
    exchanges = [subject.exchange(choice.layout, each) for choice, each in zip(choices, sizes, strict=True)]

    def compute(numbers: Iterable[int], *, gradient: bool) -> dict[int, Cost]:
        # the costs of one traced program are computed together
        groups: dict[tuple[str | None, Exchange], list[int]] = {}
        for i in numbers:
            # the forward tasks of a pipeline keep nothing for the backward, whatever the remat policy
            groups.setdefault((choices[i].remat if gradient else None, exchanges[i]), []).append(i)
        found: dict[int, Cost] = {}
        for (remat, exchange), group in groups.items():
            of_group = [shardings[i] for i in group]
            costs = subject.costs(remat, of_group, machine.rates, exchange=exchange, gradient=gradient)
            found.update(zip(group, costs, strict=True))
        return found

    found = compute(range(len(choices)), gradient=True)
    forward = compute((i for i, of in enumerate(sizes) if of[axes.PIPELINE] > 1), gradient=False)
    return [
        Step(found[i], *state, sizes[i], choice, rows[i] * subject.row_bytes, forward.get(i))
        for i, (choice, state) in enumerate(zip(choices, states, strict=True))
    ]


def predict_choices(
    subject: Subject, machine: Machine, num_devices: int, choices: Sequence[Choice], *, waits: bool = True
) -> list[Prediction]:
    """Predict several choices at once; for the arguments see `steps` and `predict`.

    Raises:
      ValueError: a layout does not fit the model.
    """
    return [predict(each, machine, waits=waits) for each in steps(subject, machine, num_devices, choices)]


def predict(step: Step, machine: Machine, *, waits: bool = True) -> Prediction:
    """Predict a step.

    Args:
      step: the inputs of the prediction.
      machine: the machine.
      waits: whether to simulate how the stages of a pipeline wait for each other. Without it, the seconds are
        a lower bound, which is faster to compute.
    """
    times = compute_step_times(step, machine)
    return Prediction(
        memory=_predict_memory(step, machine, times.table if times.num_stages > 1 else None),
        seconds=_predict_seconds(times, waits, idle_costs=not machine.simulated),
        flops=sum(runs * each.flops for runs, each in list_stage_runs(step)),
    )


SENT_AND_ARRIVED = 4
"""Activations and cotangents of one microbatch that a stage has in addition to its slots: what it computed in
the last tick and what it received, in both directions."""


@cache
def _count_slots(table: Table) -> int:
    ticks = make_ticks(table)
    return ticks.num_inputs + ticks.num_cotangents


def _predict_memory(step: Step, machine: Machine, table: Table | None) -> Memory:
    state = step.state
    # the gradients of a single microbatch are results of the program, and not added to sums
    adds_up = step.choice.accumulate > 1
    backward = step.cost.peak_bytes + state.gathered + state.gradients * adds_up
    # GPUs update the state in its own memory; XLA for CPU copies the optimizer state first, as a step may be
    # skipped
    update = state.gradients + state.optimizer * machine.rates.copies_stacked
    live = 0 if table is None else _count_slots(table) + SENT_AND_ARRIVED
    return Memory(
        parameters=state.parameters,
        optimizer=state.optimizer,
        gradients=state.gradients,
        activations=max(backward, update) - state.gradients,
        pipeline=live * step.stream_bytes,
        batch=step.batch_bytes / math.prod(step.sizes[axis] for axis in step.layout.batch_axes),
        local=step.choice.own_copies * state.updated_float32,
    )


def _predict_seconds(times: StepTimes, waits: bool, *, idle_costs: bool) -> Seconds:
    collectives: dict[tuple[str, ...], float] = {}

    def add(over: tuple[str, ...], seconds: float) -> None:
        if over and seconds:
            collectives[over] = collectives.get(over, 0.0) + seconds

    for each in times.collectives:
        add(each.axes, each.seconds)
    compute, bubble = times.compute, 0.0
    if times.num_stages > 1 and waits:
        alone = simulate(times.table, times.task).makespan + times.of_ticks
        # stages also wait for each other's collectives, which take a part of the time of each task
        bubble = idle_costs * (alone - compute) * (1 + times.in_microbatches * times.per_compute)
    if times.num_stages > 1:
        add((axes.PIPELINE,), times.table.num_ticks * times.hops)
    return Seconds(compute=compute, bubble=bubble, collectives=collectives, update=times.update)


def sum_sent_by_axes(step: Step, *, simulated: bool = False) -> dict[tuple[str, ...], float]:
    """Return mesh axes, slowest first -> bytes that a device sends in a step, by ring collectives.

    Stages of a pipeline send in both directions in every tick of its schedule.

    Args:
      step: the inputs of the prediction.
      simulated: whether the devices are simulated by XLA for CPU, which reduces the two gradients of a table
        that is used twice separately.
    """
    choice, sizes, stages = step.choice, step.sizes, step.num_stages
    found: dict[tuple[str, ...], float] = {}

    def add(over: tuple[str, ...], num_bytes: float) -> None:
        members = tuple(axis for axis in axes.AXES if axis in over and sizes.get(axis, 1) > 1)
        if members and num_bytes:
            found[members] = found.get(members, 0.0) + num_bytes

    for key, num_bytes in count_sent_parameters(step, sums_apart=simulated).items():
        add(key.axes, num_bytes)
    for each in list_sent_activations(step):
        members = math.prod(sizes.get(axis, 1) for axis in each.axes)
        add(each.axes, count_sent_bytes(each.kind, members, each.num_bytes))
    if stages > 1:
        table = make_lockstep_table(choice.schedule, stages, choice.accumulate, choice.virtual_stages)
        # the last stage sends nothing forward, the first nothing backward
        add((axes.PIPELINE,), 2 * table.num_ticks * step.stream_bytes * (stages - 1) / stages)
    return found
