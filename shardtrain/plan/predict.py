"""Predict a training step for a layout: memory of a device by component, and seconds by part. No devices.

The parts: the traced program of loss and gradient (`program_cost.py`), the state by its specs, and the
durations of tasks and collectives (`step_times.py`). Next: `search.py`, which compares layouts.
"""

import math
from collections.abc import Mapping, Sequence
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
    list_sent_activations,
    lockstep_table,
    sent_parameters,
    stage_runs,
)
from shardtrain.plan.step_times import StepTimes, step_times
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import Exchange
from shardtrain.plan.traffic import count_sent_bytes
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout

ROWS, PARTS, ARRIVED_ROWS = "rows", "parts", "arrived rows"
"""Splits of a step that are not one mesh axis: of its rows into microbatches on devices, of the blocks into
parts of a pipeline, of the rows into those that devices of the axis expert have of each other."""


def find_sharding(
    layout: Layout, sizes: Mapping[str, int], accumulate: int, chunks: int = 1, fraction: float = 1.0
) -> Sharding:
    """Return how a layout splits the arrays of a traced program, one microbatch of one chunk at a time.

    Args:
      layout: completed for the model, see `Specs.layout`.
      sizes: axis -> size.
      accumulate: number of microbatches.
      chunks: parts of the model on each stage of a pipeline.
      fraction: the part of the program's rows that this island has.
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
    """Return what several choices are predicted from.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
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
            state.layout, each, choice.accumulate, choice.virtual_stages, num_rows / subject.batch_rows
        )
        for choice, each, state, num_rows in zip(choices, sizes, states, rows, strict=True)
    ]
    exchanges = [subject.exchange(choice.layout, each) for choice, each in zip(choices, sizes, strict=True)]
    # what is traced alike is costed together
    alike: dict[tuple[str | None, Exchange], list[int]] = {}
    for i, key in enumerate(zip((choice.remat for choice in choices), exchanges, strict=True)):
        alike.setdefault(key, []).append(i)
    found: dict[int, Cost] = {}
    for (remat, exchange), numbers in alike.items():
        of_all = subject.costs(remat, [shardings[i] for i in numbers], machine.rates, exchange=exchange)
        found.update(zip(numbers, of_all, strict=True))
    # the forward tasks of a pipeline keep nothing for the backward, whatever that computes again
    forward: dict[int, Cost] = {}
    for exchange in dict.fromkeys(exchanges):
        staged = [i for i, of in enumerate(sizes) if of[axes.PIPELINE] > 1 and exchanges[i] == exchange]
        if staged:
            alone = subject.costs(
                None, [shardings[i] for i in staged], machine.rates, exchange=exchange, gradient=False
            )
            forward.update(zip(staged, alone, strict=True))
    return [
        Step(found[i], *state, sizes[i], choice, rows[i] * subject.row_bytes, forward.get(i))
        for i, (choice, state) in enumerate(zip(choices, states, strict=True))
    ]


def predictions(
    subject: Subject, machine: Machine, num_devices: int, choices: Sequence[Choice], *, waits: bool = True
) -> list[Prediction]:
    """Predict several choices at once; the arguments are those of `steps` and `predict`.

    Raises:
      ValueError: a layout does not fit the model.
    """
    return [predict(each, machine, waits=waits) for each in steps(subject, machine, num_devices, choices)]


def predict(step: Step, machine: Machine, *, waits: bool = True) -> Prediction:
    """Predict a step.

    Args:
      step: what it is predicted from.
      machine: where it runs.
      waits: whether the stages of a pipeline wait for each other; without, the seconds are a lower bound that
        is found quickly.
    """
    times = step_times(step, machine)
    return Prediction(
        memory=_memory(step, machine, times.table if times.num_stages > 1 else None),
        seconds=_seconds(times, waits, idle_costs=not machine.simulated),
        flops=sum(runs * each.flops for runs, each in stage_runs(step)),
    )


SENT_AND_ARRIVED = 4
"""Activations and cotangents of one microbatch that a stage has beside its slots: what it computed in the
last tick, both ways, and what arrived."""


@cache
def _num_slots(table: Table) -> int:
    ticks = make_ticks(table)
    return ticks.num_inputs + ticks.num_cotangents


def _memory(step: Step, machine: Machine, table: Table | None) -> Memory:
    state = step.state
    # one microbatch alone is not added to others: its gradients are results of the program
    adds_up = step.choice.accumulate > 1
    backward = step.cost.peak_bytes + state.gathered + state.gradients * adds_up
    # whether a step is skipped is known before its update, which GPUs compute in the place of the old state;
    # XLA for CPU copies that of the optimizer first
    update = state.gradients + state.optimizer * machine.rates.copies_stacked
    live = 0 if table is None else _num_slots(table) + SENT_AND_ARRIVED
    return Memory(
        parameters=state.parameters,
        optimizer=state.optimizer,
        gradients=state.gradients,
        activations=max(backward, update) - state.gradients,
        pipeline=live * step.stream_bytes,
        batch=step.batch_bytes / math.prod(step.sizes[axis] for axis in step.layout.batch_axes),
        local=step.choice.own_copies * state.updated_float32,
    )


def _seconds(times: StepTimes, waits: bool, *, idle_costs: bool) -> Seconds:
    collectives: dict[tuple[str, ...], float] = {}

    def add(over: tuple[str, ...], seconds: float) -> None:
        if over and seconds:
            collectives[over] = collectives.get(over, 0.0) + seconds

    for each in times.collectives:
        add(each.axes, each.seconds)
    compute, bubble = times.compute, 0.0
    if times.num_stages > 1 and waits:
        alone = simulate(times.table, times.task).makespan + times.of_ticks
        # stages wait for each other's collectives too, which take a part of the time of each task
        bubble = idle_costs * (alone - compute) * (1 + times.in_microbatches * times.per_compute)
    if times.num_stages > 1:
        add((axes.PIPELINE,), times.table.num_ticks * times.hops)
    return Seconds(compute=compute, bubble=bubble, collectives=collectives, update=times.update)


def sum_sent_by_axes(step: Step, *, simulated: bool = False) -> dict[tuple[str, ...], float]:
    """Return mesh axes, slowest first -> bytes that a device sends in a step, by ring collectives.

    Stages of a pipeline send in every tick of its schedule, both ways.

    Args:
      step: what the choice is predicted from.
      simulated: whether the devices are those of XLA for CPU, whose programs reduce the gradients of a table
        that is used twice one by one.
    """
    choice, sizes, stages = step.choice, step.sizes, step.num_stages
    found: dict[tuple[str, ...], float] = {}

    def add(over: tuple[str, ...], num_bytes: float) -> None:
        members = tuple(axis for axis in axes.AXES if axis in over and sizes.get(axis, 1) > 1)
        if members and num_bytes:
            found[members] = found.get(members, 0.0) + num_bytes

    for key, num_bytes in sent_parameters(step, sums_apart=simulated).items():
        add(key.axes, num_bytes)
    for each in list_sent_activations(step):
        members = math.prod(sizes.get(axis, 1) for axis in each.axes)
        add(each.axes, count_sent_bytes(each.kind, members, each.num_bytes))
    if stages > 1:
        table = lockstep_table(choice.schedule, stages, choice.accumulate, choice.virtual_stages)
        # the last stage sends nothing forward, the first nothing backward
        add((axes.PIPELINE,), 2 * table.num_ticks * step.stream_bytes * (stages - 1) / stages)
    return found
