"""What a search may choose: layouts, microbatches, recomputation, schedules; and what a run accepts of it.

Next: `search.py`, which compares the choices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardtrain import axes
from shardtrain.data.row_split import RowSplit
from shardtrain.errors.messages import near
from shardtrain.functional.remat_policies import OFFLOAD, REMAT_POLICIES
from shardtrain.pipeline.schedule import SCHEDULES
from shardtrain.plan.prediction import Choice
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import MOST_DEVICES, axis_sizes, divisors
from shardtrain.sharding.layout import ContextAttentions, Layout

REMATS = ("none", *(policy for policy in REMAT_POLICIES if policy != OFFLOAD))
"""From no recomputation to all of it. What a device exchanges with its host is not predicted."""

MOST_MICROBATCHES = 64
"""The largest number of microbatches that is tried by itself, or 4 for each stage of a pipeline."""

MESH_AXES: tuple[str, ...] = (axes.PIPELINE, axes.DATA, axes.FSDP, axes.TENSOR)
"""Axes whose sizes are always searched; of the others see `list_searched_axes`."""

LONG_SEQUENCE = 8192
"""Positions of a sequence from which on context is searched without being named."""

PART_OF_SEQUENCE = 1024
"""The least positions that a device has of a sequence where context is not named."""

CONTEXT_ATTENTIONS: tuple[ContextAttentions, ...] = ("ring", "all-gather", "all-to-all")


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search may choose.

    Args:
      layout: what layouts have in common: rules, and sizes of axes that are fixed; others are searched.
      accumulates: numbers of microbatches; (): every power of 2 that the batch allows.
      remats: ways to recompute, from the least to the most; (): all that the model has.
      schedules: of pipelines.
      own_copies: see `Choice`.

    Raises:
      ValueError: an unknown schedule or way to recompute.
    """

    layout: Layout = Layout(mesh={})
    accumulates: tuple[int, ...] = ()
    remats: tuple[str | None, ...] = REMATS
    schedules: tuple[str, ...] = ("1f1b", "zero_bubble")
    own_copies: int = 0

    def __post_init__(self) -> None:
        problems = [near(name, SCHEDULES) for name in self.schedules if name not in SCHEDULES]
        problems += [near(str(name), REMATS) for name in self.remats if name not in (None, *REMATS)]
        if problems:
            raise ValueError(f"this cannot be searched: {'; '.join(problems)}")


def list_allowed_choices(
    subject: Subject, num_devices: int, space: Space
) -> tuple[list[Choice], dict[str, str]]:
    """Return what a run would accept, recomputation left open; and mesh -> why it is refused.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: how many.
      space: what may be chosen.

    Raises:
      ValueError: sizes that are fixed do not divide the number of devices.
    """
    _check_fixed(space.layout, num_devices)
    choices: list[Choice] = []
    refused: dict[str, str] = {}
    searched = list_searched_axes(subject, space.layout)
    most_context = (
        num_devices
        if axes.CONTEXT in space.layout.mesh
        else max(subject.sequence // PART_OF_SEQUENCE, 1)
        if axes.CONTEXT in searched
        else 1
    )
    for layout in layouts(num_devices, space.layout, searched):
        if layout.mesh.get(axes.CONTEXT, 1) > most_context:
            continue
        sizes = axis_sizes(layout.mesh, num_devices)
        try:
            subject.state(Choice(layout=layout), num_devices)
        except ValueError as error:
            refused[mesh_text(layout)] = str(error)
            continue
        found = list(choices_of_layout(subject, layout, sizes, space))
        choices += found
        if not found:
            refused[mesh_text(layout)] = _no_microbatches(subject, layout, sizes, space)
    return choices, refused


def list_allowed_remats(subject: Subject, space: Space) -> list[str | None]:
    """Return the ways to recompute that the model has, from the least to the most."""
    return [remat for remat in space.remats if _has(subject, remat)]


def _has(subject: Subject, remat: str | None) -> bool:
    try:
        subject.find_model(remat)
    except ValueError:
        return False
    return True


def _check_fixed(layout: Layout, num_devices: int) -> None:
    fixed = {axis: size for axis, size in layout.mesh.items() if size != -1}
    product = math.prod(fixed.values())
    if num_devices % product:
        text = ",".join(f"{axis}={size}" for axis, size in fixed.items())
        allowed = ", ".join(map(str, divisors(num_devices)))
        raise ValueError(
            f"{text} needs a multiple of {product} devices, and there are {num_devices}; fix sizes whose"
            f" product is one of {allowed}"
        )


def list_searched_axes(subject: Subject, given: Layout) -> tuple[str, ...]:
    """Return the axes whose sizes are searched.

    Those of `MESH_AXES`, those that the mesh names, expert for a model with experts, and context for one
    whose attention the run may compute, of `LONG_SEQUENCE` positions or more.
    """
    used = set(MESH_AXES) | set(given.mesh)
    if subject.num_experts:
        used.add(axes.EXPERT)
    if subject.sequence >= LONG_SEQUENCE:
        used.add(axes.CONTEXT)
    return tuple(axis for axis in axes.AXES if axis in used)


def layouts(num_devices: int, given: Layout, searched: Sequence[str] = MESH_AXES) -> Iterator[Layout]:
    """Return every layout whose axis sizes multiply to the number of devices.

    Args:
      num_devices: how many.
      given: rules, and sizes that are fixed. Where it has ring attention over context, which is what a run
        has unless it says otherwise, the other kinds are tried too.
      searched: the axes whose sizes may be more than 1, beside those that the mesh names.
    """
    fixed = {axis: size for axis, size in given.mesh.items() if size != -1}
    searched = [axis for axis in axes.AXES if axis in searched or axis in given.mesh]
    for sizes in _factors(num_devices, len(searched)):
        mesh: dict[str, int] = dict(zip(searched, sizes, strict=True))
        if any(mesh.get(axis, 1) != size for axis, size in fixed.items()):
            continue
        mesh = {axis: size for axis, size in mesh.items() if size > 1} or {str(axes.DATA): 1}
        kinds = [given.context_attention]
        if axes.CONTEXT in mesh and kinds == ["ring"]:
            kinds = list(CONTEXT_ATTENTIONS)
        zeros = (3, 1) if axes.FSDP in mesh else (3,)
        sequences = (False, True) if axes.TENSOR in mesh else (False,)
        for zero, sequence, kind in product(zeros, sequences, kinds):
            products = given.collective_matmul and sequence
            options = {"sequence_sharded": sequence, "collective_matmul": products, "context_attention": kind}
            yield replace(given, mesh=mesh, zero=zero, **options)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Return all ways to write a number as a product of so many factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        yield from ((first, *rest) for rest in _factors(number // first, count - 1))


def choices_of_layout(
    subject: Subject, layout: Layout, sizes: Mapping[str, int], space: Space
) -> Iterator[Choice]:
    """Return the choices of one layout: numbers of microbatches that the batch allows, and schedules."""
    stages = sizes[axes.PIPELINE]
    most = max(MOST_MICROBATCHES, 4 * stages)
    for accumulate in space.accumulates or [1 << i for i in range(most.bit_length())]:
        try:
            subject.rows_of(RowSplit.of(sizes, layout.batch_axes, accumulate))
        except ValueError:
            continue
        for schedule in space.schedules if stages > 1 else ("1f1b",):
            yield Choice(layout=layout, accumulate=accumulate, schedule=schedule, own_copies=space.own_copies)


def _no_microbatches(subject: Subject, layout: Layout, sizes: Mapping[str, int], space: Space) -> str:
    try:
        subject.rows_of(RowSplit.of(sizes, layout.batch_axes, 1))
    except ValueError as error:
        return str(error)
    rows = subject.batch_rows // math.prod(sizes[axis] for axis in layout.batch_axes)
    return (
        f"none of {space.accumulates} microbatches divides the {rows} rows of a device; use one of"
        f" {', '.join(map(str, divisors(rows)))}"
    )


def mesh_text(layout: Layout) -> str:
    """Format a layout's axis sizes and options, as the command line takes them.

    >>> mesh_text(Layout(mesh={"data": 2, "fsdp": 4}, zero=1))
    '--mesh data=2,fsdp=4 --zero 1'
    """
    mesh = ",".join(f"{axis}={size}" for axis, size in layout.mesh.items())
    zero = f" --zero {layout.zero}" if layout.zero != 3 else ""
    kind = layout.context_attention
    attention = f" --context-attention {kind}" if kind != "ring" and axes.CONTEXT in layout.mesh else ""
    sequence = " --sequence-sharded" if layout.sequence_sharded else ""
    products = " --collective-matmul" if layout.collective_matmul else ""
    return f"--mesh {mesh}{zero}{sequence}{products}{attention}"


TRIED = 64
"""Numbers of devices that are tried below the one that was asked for, and as many above."""


def nearest_text(subject: Subject, num_devices: int, space: Space) -> str:
    """Say which batch, or which number of devices, would run; arguments are those of `nearest_batch`."""
    batch = nearest_batch(subject, num_devices, space)
    devices = nearest_devices(subject, num_devices, space)
    ways = [] if batch is None else [f"a batch of {batch} rows"]
    ways += [] if devices is None else [f"{devices} device{'s' * (devices > 1)}"]
    if not ways:
        return (
            "no batch helps, and no number of devices near; fix fewer sizes (--fixed), or give rules for dims"
        )
    return f"nearest that runs: {' or '.join(ways)}"


def nearest_batch(subject: Subject, num_devices: int, space: Space) -> int | None:
    """Return the number of rows nearest to the batch that some layout of these devices takes.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: how many.
      space: what may be chosen.

    Returns:
      The nearest, the larger one of two as near; None if no batch helps.
    """
    found = set()
    for layout in _placed(subject, num_devices, space):
        sizes = axis_sizes(layout.mesh, num_devices)
        for accumulate in space.accumulates or (1,):
            multiple = RowSplit.of(sizes, layout.batch_axes, accumulate).multiple
            below = subject.batch_rows - subject.batch_rows % multiple
            found |= {below, below + multiple} - {0}
    return min(found, key=lambda rows: (abs(rows - subject.batch_rows), -rows), default=None)


def nearest_devices(subject: Subject, num_devices: int, space: Space) -> int | None:
    """Return the number of devices nearest to the given one on which this batch runs; None: none was found.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: how many were asked for.
      space: what may be chosen.
    """
    for distance in range(1, TRIED + 1):
        for number in (num_devices - distance, num_devices + distance):
            if 1 <= number <= MOST_DEVICES and _runs(subject, number, space):
                return number
    return None


def _runs(subject: Subject, num_devices: int, space: Space) -> bool:
    return any(
        next(choices_of_layout(subject, layout, axis_sizes(layout.mesh, num_devices), space), None)
        for layout in _placed(subject, num_devices, space)
    )


def _placed(subject: Subject, num_devices: int, space: Space) -> Iterator[Layout]:
    """Return the layouts of so many devices that fit the model."""
    for layout in layouts(num_devices, space.layout):
        try:
            subject.state(Choice(layout=layout), num_devices)
        except ValueError:
            continue
        yield layout
