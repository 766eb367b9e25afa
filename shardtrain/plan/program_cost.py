"""Compute time, memory and collectives of a traced program on a device, for many shardings at once. No jax.

Next: `live_arrays.py`, the memory; `predict.py`, the costs of a whole step.
"""

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardtrain import axes
from shardtrain.plan.fusion import share_passes
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from shardtrain.plan.live_arrays import Trip, compute_peak_bytes, count_copies_on_gpus, sort_for_gpus
from shardtrain.plan.prediction import Cost, Loop, Segment, SentCollective
from shardtrain.plan.program import Array, CallSizes, Kernel, Program, Resharding, Sharding, Splits

Seconds = Callable[[Any, Any], Any]
"""(flops, bytes moved) -> seconds of a kernel, or (bytes written, bytes read) -> seconds of stacking; all are
arrays over shardings."""


class Durations(NamedTuple):
    """Durations of the parts of a program on a device.

    Args:
      kernel: duration of a kernel.
      stacking: duration of writing stacked arrays in a loop, and reading from them.
      fuses: see `CallSizes`.
    """

    kernel: Seconds
    stacking: Seconds = lambda written, read: 0.0 * written
    fuses: bool = True


def compute_costs(program: Program, shardings: Sequence[Sharding], seconds: Durations) -> list[Cost]:
    """Return the costs of one run of a program on a device, for each of several shardings.

    All shardings are computed at once; thousands take a second.

    Args:
      program: the program.
      shardings: how its dims are split.
      seconds: durations of kernels and stacking on a device.
    """
    splits = Splits.of(shardings)
    # shardings that change at the same places run the same kernels
    changes = np.stack([np.zeros(len(shardings), bool), *_find_changes(program, splits)], axis=1)
    group_of = np.unique(changes, axis=0, return_inverse=True)[1].reshape(-1)
    found: dict[int, Cost] = {}
    for group in range(group_of.max(initial=-1) + 1):
        numbers = np.flatnonzero(group_of == group)
        total = _sum_costs(program, splits.take(numbers), seconds)
        found |= {int(number): _select_cost(total, at) for at, number in enumerate(numbers)}
    return [found[number] for number in range(len(shardings))]


def _find_changes(program: Program, splits: Splits) -> Iterator[np.ndarray]:
    """Yield, for each resharding of a program and its loops, in which shardings it changes something."""
    for each in program.reshardings:
        if each.source is not None:
            yield splits.differ(each.before, program.arrays[each.array].dims)
    for kernel in program.kernels:
        if kernel.body is not None:
            yield from _find_changes(kernel.body, splits)


def _select_cost(total: "_Total", at: int) -> Cost:
    """Return the costs of one of the shardings."""
    return Cost(
        flops=float(total.flops[at]),
        seconds=float(total.seconds[at]),
        peak_bytes=float(total.peak_bytes[at]),
        sent=_select_sent(total.sent, at),
        loops=tuple(Loop(over, *(float(each[at]) for each in figures)) for over, *figures in total.loops),
        segments=tuple(
            Segment(float(each.flops[at]), float(each.seconds[at]), _select_sent(each.sent, at))
            for each in total.segments
        ),
    )


def _select_sent(sent: "_AllSent", at: int) -> tuple[SentCollective, ...]:
    return tuple(
        SentCollective(kind, over, float(num_bytes[at]), float(times[at]))
        for (kind, over), (num_bytes, times) in sent.items()
        if times[at]
    )


@dataclass
class _Segment:
    """A part of a program, for each sharding."""

    flops: np.ndarray
    seconds: np.ndarray
    sent: "_AllSent" = field(default_factory=dict)


@dataclass(kw_only=True)
class _Total:
    """Costs of a program, for each sharding."""

    peak_bytes: np.ndarray
    segments: list[_Segment]
    loops: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]

    @cached_property
    def flops(self) -> np.ndarray:
        return sum((each.flops for each in self.segments[1:]), self.segments[0].flops)

    @cached_property
    def seconds(self) -> np.ndarray:
        return sum((each.seconds for each in self.segments[1:]), self.segments[0].seconds)

    @cached_property
    def sent(self) -> "_AllSent":
        found: _AllSent = {}
        for each in self.segments:
            for key, (num_bytes, times) in each.sent.items():
                _add(found, key, num_bytes, times)
        return found


_AllSent = dict[tuple[str, tuple[str, ...]], tuple[np.ndarray, np.ndarray]]
"""(collective, axes) -> bytes and number of collectives, for each sharding."""


def _sum_costs(program: Program, splits: Splits, seconds: Durations, trip: Trip | None = None) -> _Total:
    """Return the costs of a program, or of one trip of a loop's body."""
    sizes = [array.num_bytes / splits.parts(array.dims, array.of_parameter) for array in program.arrays]
    kernels = _drop_unchanged(program, splits)
    if program.for_gpus:
        kernels = share_passes(kernels, sizes)
    zeros = np.zeros(len(splits.sizes))
    total = _Total(peak_bytes=zeros, segments=[_Segment(zeros, zeros)], loops=[])
    inside, behind = [], []
    for kernel in kernels:
        segment = total.segments[-1]
        if kernel.call is not None:
            inside.append(_add_call(segment, kernel, sizes, splits, seconds))
            continue
        if kernel.body is None:
            flops = kernel.flops / splits.parts(kernel.dims)
            segment.flops = segment.flops + flops
            read = sum(sizes[i] for i in kernel.reads if i not in kernel.looked_up)
            written = sum(sizes[i] for i in kernel.writes)
            moved = read + written + (written if kernel.looked_up else 0.0)
            segment.seconds = segment.seconds + seconds.kernel(flops, moved)
            inside.append(zeros)
            continue
        stacked = _find_stacked(program, kernel)
        # a stage of a pipeline runs only its own blocks
        trips = kernel.trips / splits.parts((kernel.over,))
        each_trip = _make_trip(kernel, stacked, (trips > 1) & (not kernel.unrolled))
        body = _sum_costs(kernel.body, splits, seconds, each_trip)
        if kernel.over == axes.LAYERS:
            segment = _Segment(zeros, zeros)
            total.segments += [segment, _Segment(zeros, zeros)]
            behind.append(min(kernel.writes))
        segment.flops = segment.flops + trips * body.flops
        segment.seconds = segment.seconds + trips * body.seconds
        if kernel.over is not None:
            carried = sum((sizes[i] for i in kernel.writes if i not in stacked), zeros)
            written = sum((sizes[i] for i in kernel.writes if i in stacked), zeros)
            read = sum((sizes[i] for i in kernel.operands if i in stacked), zeros)
            # a loop of one trip copies nothing
            stacking = np.where(trips > 1, seconds.stacking(written, read), 0.0)
            segment.seconds = segment.seconds + stacking
            total.loops.append((kernel.over, trips * body.seconds, carried, stacking))
        for key, (num_bytes, times) in body.sent.items():
            _add(segment.sent, key, trips * num_bytes, trips * times)
        # the results of a single trip are the results of the loop, in the same memory
        made = np.where(trips <= 1, sum((sizes[i] for i in kernel.writes), zeros), 0.0)
        inside.append(np.maximum(body.peak_bytes - made, 0.0))
    copies: dict[int, Any] = {}
    if program.for_gpus:
        order = sort_for_gpus(kernels, trip)
        kernels, inside = [kernels[at] for at in order], [inside[at] for at in order]
        copies = count_copies_on_gpus(program, kernels, sizes, splits, trip)
    total.peak_bytes = compute_peak_bytes(program, kernels, sizes, inside, copies)
    for each in program.reshardings:
        rows = None if each.rows is None else program.arrays[each.rows]
        # arrays are numbered in the order of the program
        segment = total.segments[2 * bisect(behind, each.array)]
        _add_sent(segment.sent, each, program.arrays[each.array], rows, splits)
    return total


def _find_stacked(program: Program, kernel: Kernel) -> set[int]:
    """Return the arrays of a loop that are stacked over its trips; the others are carried."""
    if kernel.over is None:
        return set()
    return {i for i in kernel.writes + kernel.operands if program.arrays[i].dims[:1] == (kernel.over,)}


def _make_trip(kernel: Kernel, stacked: Set[int], is_loop: np.ndarray) -> Trip:
    assert kernel.body is not None
    return Trip(
        carried=[of for of, i in zip(kernel.body.outputs, kernel.writes, strict=True) if i not in stacked],
        parts=[of for of, i in zip(kernel.body.inputs, kernel.operands, strict=True) if i in stacked],
        is_loop=is_loop,
    )


def _add_call(
    segment: _Segment,
    kernel: Kernel,
    sizes: Sequence[np.ndarray],
    splits: Splits,
    seconds: Durations,
) -> np.ndarray:
    """Add the costs of a call by devices; return its temporary bytes."""
    assert kernel.call is not None
    reads, writes = ([sizes[i] for i in each] for each in (kernel.operands, kernel.writes))
    found = kernel.call.cost(CallSizes(reads, writes, splits.axis_sizes, seconds.fuses))
    segment.flops = segment.flops + found.flops
    timed = found.flops if found.timed_flops is None else found.timed_flops
    segment.seconds = segment.seconds + seconds.kernel(timed, sum(reads + writes) + found.moved_bytes)
    for each in found.sent:
        _add(segment.sent, (each.kind, each.axes), each.num_bytes, each.times * np.ones(len(splits.sizes)))
    return found.temporary_bytes


def _drop_unchanged(program: Program, splits: Splits) -> list[Kernel]:
    """Return the kernels without the reshardings that change nothing in these shardings."""
    same = {
        each.array: each.source
        for each in program.reshardings
        if each.source is not None
        and not splits.differ(each.before, program.arrays[each.array].dims)[:1].any()
    }

    def source(number: int) -> int:
        while number in same:
            number = same[number]
        return number

    return [
        replace(
            kernel,
            reads=tuple(dict.fromkeys(map(source, kernel.reads))),
            looked_up=tuple(map(source, kernel.looked_up)),
        )
        if same
        else kernel
        for kernel in program.kernels
        if not (kernel.writes and kernel.writes[0] in same)
    ]


def _add_sent(sent: _AllSent, each: Resharding, array: Array, rows: Array | None, splits: Splits) -> None:
    """Add the collectives of a resharding."""
    after, before = splits.mask(array.dims), splits.mask(each.before)
    summed = splits.mask(each.summed) & ~before
    whole = array.num_bytes / splits.parts(array.dims)
    # a partial sum whose result is sharded over the same axes is scattered, otherwise every device gets it
    scattered = summed & after
    of_sum = whole * splits.product(scattered)
    gathered, of_rows = np.zeros_like(scattered), whole
    if rows is not None:
        # each device looks up its rows in the whole table, or adds all rows to its part of the table
        of_rows = rows.num_bytes / splits.product(splits.mask(rows.dims) & ~scattered)
        gathered = scattered & (of_rows < of_sum)[:, None]
    for kind, over, num_bytes in (
        (REDUCE_SCATTER, scattered & ~gathered, of_sum),
        (ALL_GATHER, gathered, of_rows),
        (ALL_REDUCE, summed & ~scattered, whole),
        (ALL_GATHER, before & ~after, whole),
    ):
        if over.any():
            # bit i of a code: whether axis i is one of those that the collective runs over
            codes = over @ (1 << np.arange(len(splits.names)))
            for code in set(codes.tolist()) - {0}:
                names = tuple(name for i, name in enumerate(splits.names) if code >> i & 1)
                here = codes == code
                _add(sent, (kind, names), here * num_bytes, here * 1.0)


def _add(sent: _AllSent, key: tuple[str, tuple[str, ...]], num_bytes: np.ndarray, times: np.ndarray) -> None:
    before = sent.get(key, (0.0, 0.0))
    sent[key] = before[0] + num_bytes, before[1] + times
