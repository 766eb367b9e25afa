"""Layouts that others would take, by name, beside which the search shows its own."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from shardtrain import axes
from shardtrain.plan.machine import Machine
from shardtrain.plan.search import Ranked, search
from shardtrain.plan.space import Space
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import divisors

Find = Callable[[Subject, Machine, int, Space], Ranked | None]
"""Model, devices, their number and what may be chosen -> the layout; None: it cannot run."""


def data_parallel(subject: Subject, machine: Machine, devices: int, space: Space) -> Ranked | None:
    """Return the fastest way with a copy of the model on each device."""
    return _fixed(subject, machine, devices, space, {axes.DATA: devices})


def megatron(subject: Subject, machine: Machine, devices: int, space: Space) -> Ranked | None:
    """Return the way of Megatron's rules: the smallest number of devices for a copy of the model that fits.

    These devices are tensor parallel inside a node, a pipeline across nodes; copies are data parallel
    (Narayanan et al. 2021, SC, sections 3.2 and 3.3, takeaways 1 and 2). If nothing fits, the one that needs
    the least memory.
    """
    smallest = None
    for model_size in divisors(devices):
        tensor = math.gcd(model_size, min(machine.devices_per_node, devices))
        pipeline = model_size // tensor
        mesh = {axes.PIPELINE: pipeline, axes.DATA: devices // model_size, axes.TENSOR: tensor}
        found = _fixed(subject, machine, devices, space, mesh)
        if found is not None and found.fits:
            return found
        if found is not None and (
            smallest is None or found.prediction.memory.total < smallest.prediction.memory.total
        ):
            smallest = found
    return smallest


NAMED: Mapping[str, Find] = {"data parallel": data_parallel, "megatron": megatron}
"""Name -> the layout."""


def named_layouts(subject: Subject, machine: Machine, devices: int, space: Space) -> dict[str, Ranked | None]:
    """Return the layout of each name.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      devices: how many.
      space: what may be chosen; sizes of axes are those of the name.
    """
    return {name: find(subject, machine, devices, space) for name, find in NAMED.items()}


def _fixed(
    subject: Subject, machine: Machine, devices: int, space: Space, mesh: Mapping[str, int]
) -> Ranked | None:
    sizes = {axis: mesh.get(axis, 1) for axis in (axes.PIPELINE, axes.DATA, axes.FSDP, axes.TENSOR)}
    fixed = replace(space, layout=replace(space.layout, mesh=sizes))
    return next(iter(search(subject, machine, devices, fixed, 1).ranked), None)
