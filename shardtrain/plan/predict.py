"""Predict a training step for a layout: memory of a device by component, and seconds by part. No devices.

The parts: the traced program of loss and gradient (`program.py`), the state by its specs, and the traffic of
parameters by theory (`traffic.py`). Next: `search.py`, which compares layouts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.simulate import simulate
from shardtrain.pipeline.table import Table
from shardtrain.plan.machine import Machine
from shardtrain.plan.program import Cost, Program, Sharding, cost
from shardtrain.plan.traffic import parameter_traffic, weights
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.placement import Specs

MICROBATCHES, CHUNKS = "microbatches", "chunks"
"""Splits of a step beside the mesh: of its rows into microbatches, of a stage's blocks into chunks."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a step.

    Args:
      layout: axis sizes and rules.
      accumulate: number of microbatches.
      remat: what the backward computes again; None: what the model says.
      schedule: of a pipeline.
      virtual_stages: parts of the model on each stage.
    """

    layout: Layout
    accumulate: int = 1
    remat: str | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device while a step runs.

    Args:
      parameters: as they are stored.
      optimizer: the optimizer's state.
      gradients: sums over microbatches.
      activations: what lies between, at the worst moment: kept and temporary arrays, gathered weights.
      pipeline: inputs of the microbatches in flight.
      batch: this device's rows.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    pipeline: float
    batch: float

    @property
    def total(self) -> float:
        """Bytes of all components."""
        return (
            self.parameters
            + self.optimizer
            + self.gradients
            + self.activations
            + self.pipeline
            + self.batch
        )


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one step on one device.

    Args:
      compute: kernels of loss and gradient.
      bubble: waiting for other stages of the pipeline.
      collectives: mesh axes -> seconds of their collectives; "pipeline" has what stages send.
      update: the optimizer.
    """

    compute: float
    bubble: float
    collectives: Mapping[tuple[str, ...], float]
    update: float

    @property
    def total(self) -> float:
        """Seconds of all parts, one after the other."""
        return self.compute + self.bubble + sum(self.collectives.values()) + self.update


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step needs on each device.

    Args:
      memory: bytes.
      seconds: seconds.
      flops: of a device in a step, recomputation included.
    """

    memory: Memory
    seconds: Seconds
    flops: float


def sharding_of(layout: Layout, sizes: Mapping[str, int], accumulate: int, chunks: int = 1) -> Sharding:
    """Return how a layout splits the arrays of a traced program, one microbatch of one chunk at a time.

    Args:
      layout: completed for the model, see `Specs.layout`.
      sizes: axis -> size.
      accumulate: number of microbatches.
      chunks: parts of the model on each stage of a pipeline.
    """
    all_sizes = {**sizes, MICROBATCHES: accumulate, CHUNKS: chunks}
    rules = dict(layout.activation_rules)
    rules[axes.BATCH] = (*layout.batch_axes, MICROBATCHES)
    rules[axes.LAYERS] = (axes.PIPELINE, CHUNKS)
    of_parameters = {**layout.parameter_rules, axes.LAYERS: (axes.PIPELINE,)}
    return Sharding(*(_split(table, all_sizes) for table in (rules,)), all_sizes, _split(of_parameters, all_sizes))


def _split(rules: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    return {dim: tuple(axis for axis in over if sizes[axis] > 1) for dim, over in rules.items()}


def predict(
    program: Program, specs: Specs, sizes: Mapping[str, int], choice: Choice, machine: Machine, batch_bytes: float
) -> Prediction:
    """Predict a step.

    Args:
      program: loss and gradient of the whole batch, traced for the choice's remat.
      specs: the state's specs for the choice's layout.
      sizes: axis -> size.
      choice: the layout and the rest.
      machine: where it runs.
      batch_bytes: of the whole batch.
    """
    layout = specs.layout
    stages, chunks = sizes[axes.PIPELINE], choice.virtual_stages
    sharding = sharding_of(layout, sizes, choice.accumulate, chunks)
    found = cost(program, sharding, machine.rates.seconds)
    table = None
    if stages > 1:
        table = make_table(choice.schedule, stages, choice.accumulate, chunks, lockstep=True)
    rows = math.prod(sizes[axis] for axis in layout.batch_axes)
    memory = _memory(specs, sizes, choice, found, batch_bytes / rows, table, program, sharding)
    seconds = _seconds(specs, sizes, choice, found, machine, table, program, sharding)
    return Prediction(memory=memory, seconds=seconds, flops=choice.accumulate * found.flops)


def _memory(
    specs: Specs,
    sizes: Mapping[str, int],
    choice: Choice,
    found: Cost,
    batch_bytes: float,
    table: Table | None,
    program: Program,
    sharding: Sharding,
) -> Memory:
    parameters = tree_bytes(specs.abstract.params, specs.params, sizes)
    optimizer = tree_bytes(specs.abstract.opt_state, specs.state.opt_state, sizes)
    # one microbatch alone is not added to others: its gradients are results of the program
    adds_up = choice.accumulate > 1
    gradients = _gradient_bytes(program, sharding)
    gathered = _gathered_bytes(specs, sizes)
    backward = found.peak_bytes + gathered + gradients * adds_up
    # a step that may be skipped keeps the old optimizer state until the new one is accepted
    update = gradients + optimizer
    worst = max(backward, update)
    live = 0 if table is None else max(table.live(stage) for stage in range(table.num_stages))
    return Memory(
        parameters=parameters,
        optimizer=optimizer,
        gradients=gradients,
        activations=worst - gradients,
        pipeline=live * _stream_bytes(program, sharding),
        batch=batch_bytes,
    )


def _gradient_bytes(program: Program, sharding: Sharding) -> float:
    arrays = (program.arrays[number] for number in dict.fromkeys(program.outputs))
    return sum(sharding.array_bytes(array) for array in arrays if array.of_parameter)


def _stream_bytes(program: Program, sharding: Sharding) -> float:
    """Return the bytes that one block hands to the next, of one microbatch on one device."""
    loops = [kernel for kernel in program.kernels if kernel.over == axes.LAYERS]
    if not loops:
        return 0.0
    # of what the loop writes, the carried arrays are not stacked over blocks
    carried = (program.arrays[number] for number in loops[0].writes)
    return sum(sharding.array_bytes(array) for array in carried if array.dims[:1] != (axes.LAYERS,))


def _gathered_bytes(specs: Specs, sizes: Mapping[str, int]) -> float:
    """Return the bytes of weights that fsdp shards and a device has gathered: one block, and all others."""
    if specs.layout.zero != 3 or sizes[axes.FSDP] == 1:
        return 0.0
    found = 0.0
    for named in specs.arrays.values():
        dims = named.dims or ()
        stored = [axis for dim in dims for axis in specs.layout.parameter_rules.get(dim or "", ())]
        if axes.FSDP not in stored:
            continue
        kept = math.prod(sizes[axis] for axis in set(stored) - {axes.FSDP, axes.PIPELINE})
        blocks = named.shape[0] if axes.LAYERS in dims else 1
        found += 4 * math.prod(named.shape) / blocks / kept
    return found


def _seconds(
    specs: Specs,
    sizes: Mapping[str, int],
    choice: Choice,
    found: Cost,
    machine: Machine,
    table: Table | None,
    program: Program,
    sharding: Sharding,
) -> Seconds:
    collectives: dict[tuple[str, ...], float] = {}

    def add(over: tuple[str, ...], seconds: float) -> None:
        over = tuple(axis for axis in over if sizes.get(axis, 1) > 1)
        if over and seconds:
            collectives[over] = collectives.get(over, 0.0) + seconds

    of_weights = weights(specs.arrays, specs.layout.sharded_rules)
    for key, sent in parameter_traffic(of_weights, specs.layout, sizes, choice.accumulate).items():
        link = machine.link(key.axes, sizes)
        add(key.axes, sent / link.bytes_per_second)
    for sent in found.sent:
        on_mesh = tuple(axis for axis in sent.axes if axis in axes.AXES)
        add(on_mesh, choice.accumulate * machine.collective_seconds(sent.kind, on_mesh, sizes, sent.num_bytes))
    parameters = tree_bytes(specs.abstract.params, specs.sharded, sizes)
    optimizer = tree_bytes(specs.abstract.opt_state, specs.state.opt_state, sizes)
    update = machine.rates.seconds(0.0, 3 * parameters + 2 * optimizer)
    compute = choice.accumulate * found.seconds
    if table is None:
        return Seconds(compute=compute, bubble=0.0, collectives=collectives, update=update)
    # each task of a stage computes one chunk of its blocks; a backward computes the forward again
    inside = [seconds for over, seconds in found.loops if over == axes.LAYERS]
    forward, backward = (inside[0], sum(inside[1:])) if inside else (found.seconds / 3, found.seconds * 2 / 3)
    ends = found.seconds - sum(inside)
    last = table.num_stages - 1

    def task(stage: int, chunk: int, kind: str) -> float:
        of_last = ends if stage == last and chunk == choice.virtual_stages - 1 else 0.0
        if kind == "forward":
            return forward
        parts = len(table.kinds) - 1
        return forward + (backward + of_last) / parts

    stream = _stream_bytes(program, sharding)
    link = machine.link((axes.PIPELINE,), sizes)
    hop = link.latency_seconds + stream / link.bytes_per_second
    alone = simulate(table, task)
    sent = simulate(table, task, hop)
    work = sum(task(t.stage, t.chunk, t.kind) for t in table.tasks) / table.num_stages
    add((axes.PIPELINE,), sent.makespan - alone.makespan)
    return Seconds(compute=work, bubble=alone.makespan - work, collectives=collectives, update=update)


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
