"""Predict a training step for a layout: memory of a device by component, and seconds by part. No devices.

The parts: the traced program of loss and gradient (`program_cost.py`), the state by its specs, and the
durations of tasks and collectives (`step_times.py`). Next: `search.py`, which compares layouts.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.pipeline.simulate import simulate
from shardtrain.pipeline.table import Table
from shardtrain.pipeline.tick_arrays import make_ticks
from shardtrain.plan.cost import Cost
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice, Memory, Prediction, Seconds, StateFigures
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS
from shardtrain.plan.splits import Sharding
from shardtrain.plan.stage_runs import stage_runs
from shardtrain.plan.step_times import StepTimes, step_times, stream_bytes
from shardtrain.plan.weights import Weight, weights
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.placement import Specs

ROWS, PARTS, ARRIVED_ROWS = "rows", "parts", "arrived rows"
"""Splits of a step that are not one mesh axis: of its rows into microbatches on devices, of the blocks into
parts of a pipeline, of the rows into those that devices of the axis expert have of each other."""


def state_figures(
    specs: Specs, sizes: Mapping[str, int], item_bytes: int = 4, num_gradients: Sequence[int] = ()
) -> StateFigures:
    """Return what follows from the specs of a state.

    Args:
      specs: the specs.
      sizes: axis -> size.
      item_bytes: of an element in computations.
      num_gradients: see `traffic.weights`.
    """
    blocks = [named.shape[0] for named in specs.arrays.values() if axes.LAYERS in (named.dims or ())[:1]]
    params = specs.abstract.params
    in_float32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), params)
    return StateFigures(
        parameters=tree_bytes(params, specs.params, sizes),
        optimizer=tree_bytes(specs.abstract.opt_state, specs.state.opt_state, sizes),
        gradients=tree_bytes(in_float32, specs.params, sizes),
        updated=tree_bytes(params, specs.sharded, sizes),
        updated_float32=tree_bytes(in_float32, specs.sharded, sizes),
        gathered=_gathered_bytes(specs, sizes, item_bytes),
        weights=_joined(weights(specs.arrays, specs.layout.sharded_rules, num_gradients)),
        num_blocks=max(blocks, default=1),
        item_bytes=item_bytes,
    )


def _joined(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return one weight for all that are sharded alike: their traffic is that of one as large as all."""
    elements: dict[tuple[frozenset[str], bool, int], int] = {}
    for each in weights:
        key = each.axes, each.in_blocks, each.num_gradients
        elements[key] = elements.get(key, 0) + each.num_elements
    return tuple(
        Weight(num_elements=number, axes=over, in_blocks=in_blocks, num_gradients=num_gradients)
        for (over, in_blocks, num_gradients), number in elements.items()
    )


def _gathered_bytes(specs: Specs, sizes: Mapping[str, int], item_bytes: int) -> float:
    if specs.layout.zero != 3 or sizes[axes.FSDP] == 1:
        return 0.0
    found = 0.0
    for named in specs.arrays.values():
        dims = named.dims or ()
        stored = {axis for dim in dims for axis in specs.layout.parameter_rules.get(dim or "", ())}
        if axes.FSDP in stored:
            kept = math.prod(sizes[axis] for axis in stored - {axes.FSDP, axes.PIPELINE})
            blocks = named.shape[0] if axes.LAYERS in dims else 1
            found += item_bytes * math.prod(named.shape) / blocks / kept
    return found


def sharding_of(
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


def predict(
    found: Cost,
    state: StateFigures,
    layout: Layout,
    sizes: Mapping[str, int],
    choice: Choice,
    machine: Machine,
    batch_bytes: float,
    *,
    forward: Cost | None = None,
    waits: bool = True,
) -> Prediction:
    """Predict a step.

    Args:
      found: the cost of one microbatch of one chunk, of `sharding_of`.
      state: of the state's specs.
      layout: completed for the model.
      sizes: axis -> size.
      choice: the layout and the rest.
      machine: where it runs.
      batch_bytes: of this island's rows.
      forward: of a pipeline, the cost of the loss alone of one microbatch of one chunk.
      waits: whether the stages of a pipeline wait for each other; without, the seconds are a lower bound that
        is found quickly.
    """
    rows = math.prod(sizes[axis] for axis in layout.batch_axes)
    times = step_times(found, state, layout, sizes, choice, machine, forward)
    table = times.table if times.num_stages > 1 else None
    return Prediction(
        memory=_memory(state, choice, found, machine, batch_bytes / rows, table),
        seconds=_seconds(times, waits, idle_costs=not machine.simulated),
        flops=sum(runs * each.flops for runs, each in stage_runs(found, forward, sizes, choice)),
    )


SENT_AND_ARRIVED = 4
"""Activations and cotangents of one microbatch that a stage has beside its slots: what it computed in the
last tick, both ways, and what arrived."""


@cache
def _num_slots(table: Table) -> int:
    ticks = make_ticks(table)
    return ticks.num_inputs + ticks.num_cotangents


def _memory(
    state: StateFigures,
    choice: Choice,
    found: Cost,
    machine: Machine,
    batch_bytes: float,
    table: Table | None,
) -> Memory:
    # one microbatch alone is not added to others: its gradients are results of the program
    adds_up = choice.accumulate > 1
    backward = found.peak_bytes + state.gathered + state.gradients * adds_up
    # whether a step is skipped is known before its update, which GPUs compute in the place of the old state;
    # XLA for CPU copies that of the optimizer first
    update = state.gradients + state.optimizer * machine.rates.copies_stacked
    live = 0 if table is None else _num_slots(table) + SENT_AND_ARRIVED
    return Memory(
        parameters=state.parameters,
        optimizer=state.optimizer,
        gradients=state.gradients,
        activations=max(backward, update) - state.gradients,
        pipeline=live * stream_bytes(found),
        batch=batch_bytes,
        local=choice.own_copies * state.updated_float32,
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


def tree_bytes(tree: Any, specs: Any, sizes: Mapping[str, int]) -> float:
    """Return the bytes of a device's part of some arrays.

    Args:
      tree: shapes and dtypes.
      specs: like tree, a PartitionSpec each.
      sizes: axis -> size.
    """
    leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return sum(
        math.prod(x.shape) * x.dtype.itemsize / _parts(spec, sizes)
        for x, spec in zip(jax.tree.leaves(tree), leaves, strict=True)
    )


def _parts(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
    return math.prod(sizes[axis] for entry in entries for axis in entry)
