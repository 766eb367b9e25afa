"""The space of a search: layouts, microbatches, remat policies and schedules, and those that a run accepts.

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
"""Remat policies, from no recomputation to full. Offloading to the host is not predicted."""

MOST_MICROBATCHES = 64
"""Largest number of microbatches to search, or 4 for each stage of a pipeline if that is more."""

MESH_AXES: tuple[str, ...] = (axes.PIPELINE, axes.DATA, axes.FSDP, axes.TENSOR)
"""Axes whose sizes are always searched; for other axes see `list_searched_axes`."""

LONG_SEQUENCE = 8192
"""Positions of a sequence from which the axis context is searched without being named."""

PART_OF_SEQUENCE = 1024
"""Least positions of a sequence on a device, unless context is named."""

CONTEXT_ATTENTIONS: tuple[ContextAttentions, ...] = ("ring", "all-gather", "all-to-all")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The choices of a search.

    Args:
      layout: rules and fixed axis sizes of all layouts; other sizes are searched.
      accumulates: numbers of microbatches. () means every power of 2 that the batch allows.
      remats: remat policies, in the order of increasing recomputation.
      schedules: schedules of pipelines.
      own_copies: see `Choice`.

    Raises:
      ValueError: an unknown schedule or remat policy.
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
    """Return the choices that a run accepts, without remat policies; and mesh -> why it is refused.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: number of devices.
      space: the choices.

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
    for layout in list_layouts(num_devices, space.layout, searched):
        if layout.mesh.get(axes.CONTEXT, 1) > most_context:
            continue
        sizes = axis_sizes(layout.mesh, num_devices)
        try:
            subject.state(Choice(layout=layout), num_devices)
        except ValueError as error:
            refused[mesh_text(layout)] = str(error)
            continue
        found = list(list_layout_choices(subject, layout, sizes, space))
        choices += found
        if not found:
            refused[mesh_text(layout)] = _explain_refusal(subject, layout, sizes, space)
    return choices, refused


def list_allowed_remats(subject: Subject, space: Space) -> list[str | None]:
    """Return the remat policies that the model has."""
    return list(filter(subject.has_remat, space.remats))


def count_mixed_blocks(subject: Subject, space: Space) -> int:
    """Return the number of blocks of which some may recompute all, others nothing; 0 if all are alike."""
    chain = subject.find_model(None).chain
    number = 0 if chain is None else chain.num_blocks
    mixes = number > 1 and {"none", "full"} <= set(space.remats)
    return number if mixes and subject.has_remat(f"full=1,none={number - 1}") else 0


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

    They are `MESH_AXES`, axes that the mesh names, expert for models with experts, and context for models of
    at least `LONG_SEQUENCE` positions that let the run compute attention.
    """
    used = set(MESH_AXES) | set(given.mesh)
    if subject.num_experts:
        used.add(axes.EXPERT)
    if subject.sequence >= LONG_SEQUENCE:
        used.add(axes.CONTEXT)
    return tuple(axis for axis in axes.AXES if axis in used)


def list_layouts(num_devices: int, given: Layout, searched: Sequence[str] = MESH_AXES) -> Iterator[Layout]:
    """Return every layout whose axis sizes multiply to the number of devices.

    Args:
      num_devices: number of devices.
      given: rules and fixed axis sizes. If it has ring attention over context, which is the default of a run,
        the other kinds are tried too.
      searched: axes whose sizes may be more than 1, in addition to axes that the mesh names.
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
    """Yield all ways to write a number as a product of `count` factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        yield from ((first, *rest) for rest in _factors(number // first, count - 1))


def list_layout_choices(
    subject: Subject, layout: Layout, sizes: Mapping[str, int], space: Space
) -> Iterator[Choice]:
    """Yield the choices of one layout: numbers of microbatches that the batch allows, and schedules."""
    stages = sizes[axes.PIPELINE]
    most = max(MOST_MICROBATCHES, 4 * stages)
    for accumulate in space.accumulates or [1 << i for i in range(most.bit_length())]:
        try:
            subject.rows_of(RowSplit.of(sizes, layout.batch_axes, accumulate))
        except ValueError:
            continue
        for schedule in space.schedules if stages > 1 else ("1f1b",):
            yield Choice(layout=layout, accumulate=accumulate, schedule=schedule, own_copies=space.own_copies)


def _explain_refusal(subject: Subject, layout: Layout, sizes: Mapping[str, int], space: Space) -> str:
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
    """Format the axis sizes and options of a layout for the command line.

    >>> mesh_text(Layout(mesh={"data": 2, "fsdp": 4}, zero=1))
    '--mesh data=2,fsdp=4 --zero 1'
    """
    mesh = ",".join(f"{axis}={size}" for axis, size in layout.mesh.items())
    zero = f" --zero {layout.zero}" if layout.zero != 3 else ""
    kind = layout.context_attention
    attention = f" --context-attention {kind}" if kind != "ring" and axes.CONTEXT in layout.mesh else ""
    sequence = " --sequence-sharded" if layout.sequence_sharded else ""
    products = " --collective-matmul" if layout.collective_matmul else ""
    operators = f" and {len(layout.operators)} operators" if layout.operators else ""
    return f"--mesh {mesh}{zero}{sequence}{products}{attention}{operators}"


TRIED = 64
"""Largest distance from the asked number of devices to a number that is tried instead."""


def nearest_text(subject: Subject, num_devices: int, space: Space) -> str:
    """Format which batch or number of devices would run; for the arguments see `find_nearest_batch`."""
    batch = find_nearest_batch(subject, num_devices, space)
    devices = find_nearest_devices(subject, num_devices, space)
    ways = [] if batch is None else [f"a batch of {batch} rows"]
    ways += [] if devices is None else [f"{devices} device{'s' * (devices > 1)}"]
    if not ways:
        return "no other batch and no near number of devices runs; fix fewer sizes (--fixed), or add rules"
    return f"nearest that runs: {' or '.join(ways)}"


def find_nearest_batch(subject: Subject, num_devices: int, space: Space) -> int | None:
    """Return the number of rows, nearest to the batch, that some layout of these devices accepts.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: number of devices.
      space: the choices.

    Returns:
      The nearest number, and the larger of two at the same distance; None if no batch runs.
    """
    found = set()
    for layout in _list_fitting_layouts(subject, num_devices, space):
        sizes = axis_sizes(layout.mesh, num_devices)
        for accumulate in space.accumulates or (1,):
            multiple = RowSplit.of(sizes, layout.batch_axes, accumulate).multiple
            below = subject.batch_rows - subject.batch_rows % multiple
            found |= {below, below + multiple} - {0}
    return min(found, key=lambda rows: (abs(rows - subject.batch_rows), -rows), default=None)


def find_nearest_devices(subject: Subject, num_devices: int, space: Space) -> int | None:
    """Return the nearest number of devices on which this batch runs; None if there is none near.

    Args:
      subject: the model, its loss, optimizer and batch.
      num_devices: the asked number of devices.
      space: the choices.
    """
    for distance in range(1, TRIED + 1):
        for number in (num_devices - distance, num_devices + distance):
            if 1 <= number <= MOST_DEVICES and _has_choice(subject, number, space):
                return number
    return None


def _has_choice(subject: Subject, num_devices: int, space: Space) -> bool:
    return any(
        next(list_layout_choices(subject, layout, axis_sizes(layout.mesh, num_devices), space), None)
        for layout in _list_fitting_layouts(subject, num_devices, space)
    )


def _list_fitting_layouts(subject: Subject, num_devices: int, space: Space) -> Iterator[Layout]:
    """Yield the layouts of a number of devices that fit the model."""
    for layout in list_layouts(num_devices, space.layout):
        try:
            subject.state(Choice(layout=layout), num_devices)
        except ValueError:
            continue
        yield layout
