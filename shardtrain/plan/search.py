"""Search the layouts of a number of devices: which fit the model and the memory, and how fast each is.

Every combination of axis sizes, ZeRO stage, microbatches, schedule and recomputation is judged by the checks
that a run makes itself, and predicted by `predict.py`.
"""

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardtrain import axes
from shardtrain.data.row_split import RowSplit
from shardtrain.errors.messages import near
from shardtrain.functional.remat_policies import REMAT_POLICIES
from shardtrain.pipeline.schedule import SCHEDULES
from shardtrain.plan.machine import Machine
from shardtrain.plan.predict import predict
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.steps import steps
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import MOST_DEVICES, axis_sizes, divisors
from shardtrain.sharding.layout import Layout

REMATS = ("none", *REMAT_POLICIES)
"""From no recomputation to all of it."""

MOST_MICROBATCHES = 64
"""The largest number of microbatches that is tried by itself, or 4 for each stage of a pipeline."""

MESH_AXES: tuple[str, ...] = (axes.PIPELINE, axes.DATA, axes.FSDP, axes.TENSOR)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search may choose.

    Args:
      layout: what layouts have in common: rules, and sizes of axes that are fixed; others are searched.
      accumulates: numbers of microbatches; (): every power of 2 that the batch allows.
      remats: ways to recompute, from the least to the most; (): all that the model has.
      schedules: of pipelines.

    Raises:
      ValueError: an unknown schedule or way to recompute.
    """

    layout: Layout = Layout(mesh={})
    accumulates: tuple[int, ...] = ()
    remats: tuple[str | None, ...] = REMATS
    schedules: tuple[str, ...] = ("1f1b", "zero_bubble")

    def __post_init__(self) -> None:
        problems = [near(name, SCHEDULES) for name in self.schedules if name not in SCHEDULES]
        problems += [near(str(name), REMATS) for name in self.remats if name not in (None, *REMATS)]
        if problems:
            raise ValueError(f"this cannot be searched: {'; '.join(problems)}")


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A choice that a run would accept.

    Args:
      choice: the choice.
      prediction: what it needs.
      fits: whether its memory is within that of a device.
    """

    choice: Choice
    prediction: Prediction
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search.

    Args:
      ranked: those that fit, the fastest first; then the others, the smallest first.
      refused: mesh -> why the run's own checks refuse it.
      num_choices: how many choices were compared, recomputations not counted.
    """

    ranked: tuple[Ranked, ...]
    refused: Mapping[str, str]
    num_choices: int


def search(
    subject: Subject, machine: Machine, num_devices: int, space: Space | None = None, most: int = 20
) -> Plan:
    """Rank the ways to run a step on equal devices.

    Of each mesh, number of microbatches and schedule, that recomputation is taken which computes the least
    again and fits; if none fits, the one that needs the least memory.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      space: what may be chosen; None: everything.
      most: how many of the best to return.
    """
    space = space or Space()
    if not 1 <= num_devices <= MOST_DEVICES:
        raise ValueError(f"a plan of {num_devices} devices was asked for; use 1 to {MOST_DEVICES}")
    _check_fixed(space.layout, num_devices)
    choices, refused = [], {}
    for layout in _layouts(num_devices, space.layout):
        sizes = axis_sizes(layout.mesh, num_devices)
        try:
            subject.state(Choice(layout=layout), num_devices)
        except ValueError as error:
            refused[mesh_text(layout)] = str(error)
            continue
        found = list(_of_layout(subject, layout, sizes, space))
        choices += found
        if not found:
            refused[mesh_text(layout)] = _no_microbatches(subject, layout, sizes, space)
    remats = [remat for remat in space.remats if _has(subject, remat)]
    bounds = _least_recomputed(subject, machine, num_devices, choices, remats)
    ranked: list[Ranked] = []
    # what a pipeline waits is simulated for those alone that may be among the best
    for bound in sorted(bounds, key=_rank):
        if len(ranked) >= most and _rank(bound) > _rank(ranked[most - 1]):
            break
        if bound.choice.layout.mesh.get(axes.PIPELINE, 1) > 1:
            (exact,) = predictions(subject, machine, num_devices, [bound.choice])
            bound = replace(bound, prediction=exact)
        insort(ranked, bound, key=_rank)
    return Plan(ranked=tuple(ranked[:most]), refused=refused, num_choices=len(choices))


def _rank(each: Ranked) -> tuple[bool, float]:
    needed = each.prediction
    return not each.fits, needed.seconds.total if each.fits else needed.memory.total


def _has(subject: Subject, remat: str | None) -> bool:
    try:
        subject.model_of(remat)
    except ValueError:
        return False
    return True


def _least_recomputed(
    subject: Subject,
    machine: Machine,
    num_devices: int,
    choices: Sequence[Choice],
    remats: Sequence[str | None],
) -> list[Ranked]:
    """Return each choice with the least recomputation that fits, or the smallest, and bounds of its time."""
    best: dict[int, Ranked] = {}
    for remat in remats:
        open_numbers = [i for i in range(len(choices)) if i not in best or not best[i].fits]
        tried = [replace(choices[i], remat=remat) for i in open_numbers]
        found = predictions(subject, machine, num_devices, tried, waits=False)
        for i, choice, prediction in zip(open_numbers, tried, found, strict=True):
            fits = prediction.memory.total <= machine.rates.memory_bytes
            one = Ranked(choice=choice, prediction=prediction, fits=fits)
            if i not in best or _rank(one) < _rank(best[i]):
                best[i] = one
    return list(best.values())


def predictions(
    subject: Subject, machine: Machine, num_devices: int, choices: Sequence[Choice], *, waits: bool = True
) -> list[Prediction]:
    """Predict several choices at once.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      choices: the choices.
      waits: see `predict.predict`.

    Raises:
      ValueError: a layout does not fit the model.
    """
    return [
        predict(
            each.cost,
            each.state.figures,
            each.state.layout,
            each.sizes,
            each.choice,
            machine,
            each.batch_bytes,
            waits=waits,
        )
        for each in steps(subject, machine, num_devices, choices)
    ]


def _check_fixed(layout: Layout, num_devices: int) -> None:
    fixed = {axis: size for axis, size in layout.mesh.items() if size != -1}
    unknown = [near(axis, MESH_AXES) for axis in fixed if axis not in MESH_AXES]
    if unknown:
        raise ValueError(f"this axis cannot be fixed in a plan: {'; '.join(unknown)}")
    product = math.prod(fixed.values())
    if num_devices % product:
        text = ",".join(f"{axis}={size}" for axis, size in fixed.items())
        allowed = ", ".join(map(str, divisors(num_devices)))
        raise ValueError(
            f"{text} needs a multiple of {product} devices, and there are {num_devices}; fix sizes whose"
            f" product is one of {allowed}"
        )


def _layouts(num_devices: int, given: Layout) -> Iterator[Layout]:
    """Return every layout whose axis sizes multiply to the number of devices."""
    fixed = {axis: size for axis, size in given.mesh.items() if size != -1}
    for sizes in _factors(num_devices, len(MESH_AXES)):
        mesh: dict[str, int] = dict(zip(MESH_AXES, sizes, strict=True))
        if any(mesh.get(axis, 1) != size for axis, size in fixed.items()):
            continue
        mesh = {axis: size for axis, size in mesh.items() if size > 1} or {str(axes.DATA): 1}
        for zero in (3, 1) if axes.FSDP in mesh else (3,):
            for sequence_sharded in (False, True) if axes.TENSOR in mesh else (False,):
                yield replace(given, mesh=mesh, zero=zero, sequence_sharded=sequence_sharded)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Return all ways to write a number as a product of so many factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        yield from ((first, *rest) for rest in _factors(number // first, count - 1))


def _of_layout(subject: Subject, layout: Layout, sizes: Mapping[str, int], space: Space) -> Iterator[Choice]:
    """Return the choices of one layout: numbers of microbatches that the batch allows, and schedules."""
    stages = sizes[axes.PIPELINE]
    most = max(MOST_MICROBATCHES, 4 * stages)
    for accumulate in space.accumulates or [1 << i for i in range(most.bit_length())]:
        try:
            subject.rows_of(RowSplit.of(sizes, layout.batch_axes, accumulate))
        except ValueError:
            continue
        for schedule in space.schedules if stages > 1 else ("1f1b",):
            yield Choice(layout=layout, accumulate=accumulate, schedule=schedule)


def _no_microbatches(subject: Subject, layout: Layout, sizes: Mapping[str, int], space: Space) -> str:
    try:
        subject.rows_of(RowSplit.of(sizes, layout.batch_axes, 1))
    except ValueError as error:
        return str(error)
    return f"none of {space.accumulates} microbatches divides the batch of {subject.batch_rows}"


def mesh_text(layout: Layout) -> str:
    """Format a layout's axis sizes and options, as the command line takes them.

    >>> mesh_text(Layout(mesh={"data": 2, "fsdp": 4}, zero=1))
    '--mesh data=2,fsdp=4 --zero 1'
    """
    mesh = ",".join(f"{axis}={size}" for axis, size in layout.mesh.items())
    zero = f" --zero {layout.zero}" if layout.zero != 3 else ""
    return f"--mesh {mesh}{zero}{' --sequence-sharded' if layout.sequence_sharded else ''}"
