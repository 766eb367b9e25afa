"""What a traced program costs a device, for many shardings at once: time, memory, collectives. No jax.

The same program is costed for every layout: a layout says which dims are sharded, and how often. Next:
`predict.py`, the costs of a whole step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from shardtrain.plan.program import Array, Kernel, Program, Resharded
from shardtrain.plan.splits import Sharding, Splits


class Sent(NamedTuple):
    """Collectives of one kind over the same axes.

    Args:
      kind: as in `plan.hlo.collectives`.
      axes: mesh axes that they run over.
      num_bytes: of the arrays of all of them together, on one device.
      times: number of collectives.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    times: float


class Loop(NamedTuple):
    """A loop over a named dim, such as the blocks of a model.

    Args:
      over: the dim.
      seconds: of all its trips.
      carried_bytes: what one trip hands to the next.
    """

    over: str
    seconds: float
    carried_bytes: float


class Cost(NamedTuple):
    """What one run of a program costs a device.

    Args:
      flops: of matrix products and convolutions.
      seconds: by the `seconds` that `costs` was given.
      peak_bytes: the most memory for results and temporary arrays at any time, without inputs.
      sent: collectives of activations.
      loops: those over a named dim, in order.
    """

    flops: float
    seconds: float
    peak_bytes: float
    sent: tuple[Sent, ...]
    loops: tuple[Loop, ...]


Seconds = Callable[[Any, Any], Any]
"""(flops, bytes moved) -> seconds of a kernel; of arrays with a number for each sharding."""


def costs(program: Program, shardings: Sequence[Sharding], seconds: Seconds) -> list[Cost]:
    """Return what one run of a program costs a device, for each of several shardings.

    All shardings are costed at once, so that thousands take a second.

    Args:
      program: the program.
      shardings: how its dims are split.
      seconds: of one kernel on a device.
    """
    splits = Splits.of(shardings)
    # shardings that change at the same places run the same kernels
    changes = np.stack([np.zeros(len(shardings), bool), *_changes(program, splits)], axis=1)
    group_of = np.unique(changes, axis=0, return_inverse=True)[1].reshape(-1)
    found: dict[int, Cost] = {}
    for group in range(group_of.max(initial=-1) + 1):
        numbers = np.flatnonzero(group_of == group)
        total = _total(program, splits.take(numbers), seconds)
        found |= {int(number): _cost(total, at) for at, number in enumerate(numbers)}
    return [found[number] for number in range(len(shardings))]


def _changes(program: Program, splits: Splits) -> Iterator[np.ndarray]:
    """Return, for each possible change of a sharding, where it is one; in the bodies of loops too."""
    for each in program.resharded:
        if each.source is not None:
            yield splits.differ(each.before, program.arrays[each.array].dims)
    for kernel in program.kernels:
        if kernel.body is not None:
            yield from _changes(kernel.body, splits)


def _cost(total: "_Total", at: int) -> Cost:
    """Return the costs of one of the shardings."""
    return Cost(
        flops=float(total.flops[at]),
        seconds=float(total.seconds[at]),
        peak_bytes=float(total.peak_bytes[at]),
        sent=tuple(
            Sent(kind, over, float(num_bytes[at]), float(times[at]))
            for (kind, over), (num_bytes, times) in total.sent.items()
            if times[at]
        ),
        loops=tuple(Loop(over, float(times[at]), float(carried[at])) for over, times, carried in total.loops),
    )


@dataclass(kw_only=True)
class _Total:
    """Costs, with a number for each sharding."""

    flops: np.ndarray
    seconds: np.ndarray
    peak_bytes: np.ndarray
    sent: "_AllSent"
    loops: list[tuple[str, np.ndarray, np.ndarray]]


_AllSent = dict[tuple[str, tuple[str, ...]], tuple[np.ndarray, np.ndarray]]
"""(collective, axes) -> bytes and number of collectives, with a number for each sharding."""


def _total(program: Program, splits: Splits, seconds: Seconds) -> _Total:
    sizes = [array.num_bytes / splits.parts(array.dims, array.of_parameter) for array in program.arrays]
    kernels = _placed(program, splits)
    zeros = np.zeros(len(splits.sizes))
    total = _Total(flops=zeros, seconds=zeros, peak_bytes=zeros, sent={}, loops=[])
    inside = []
    for kernel in kernels:
        if kernel.body is None:
            flops = kernel.flops / splits.parts(kernel.dims)
            total.flops = total.flops + flops
            total.seconds = total.seconds + seconds(
                flops, sum(sizes[i] for i in (*kernel.reads, *kernel.writes))
            )
            inside.append(zeros)
            continue
        body = _total(kernel.body, splits, seconds)
        # a stage of a pipeline runs its own blocks alone
        trips = kernel.trips / splits.parts((kernel.over,))
        total.flops = total.flops + trips * body.flops
        total.seconds = total.seconds + trips * body.seconds
        if kernel.over is not None:
            # what a loop writes is stacked over its trips, or carried from one to the next
            carried = (i for i in kernel.writes if program.arrays[i].dims[:1] != (kernel.over,))
            total.loops.append((kernel.over, trips * body.seconds, sum((sizes[i] for i in carried), zeros)))
        for key, (num_bytes, times) in body.sent.items():
            _add(total.sent, key, trips * num_bytes, trips * times)
        # what one trip makes is its part of what the loop makes, and is there once
        made = np.where(trips <= 1, sum((sizes[i] for i in kernel.writes), zeros), 0.0)
        inside.append(np.maximum(body.peak_bytes - made, 0.0))
    total.peak_bytes = _peak_bytes(program, kernels, sizes, inside)
    for each in program.resharded:
        _add_sent(total.sent, each, program.arrays[each.array], splits)
    return total


def _placed(program: Program, splits: Splits) -> list[Kernel]:
    """Return the kernels without changes of sharding that change nothing in these shardings."""
    same = {
        each.array: each.source
        for each in program.resharded
        if each.source is not None
        and not splits.differ(each.before, program.arrays[each.array].dims)[:1].any()
    }

    def source(number: int) -> int:
        while number in same:
            number = same[number]
        return number

    return [
        replace(kernel, reads=tuple(dict.fromkeys(map(source, kernel.reads)))) if same else kernel
        for kernel in program.kernels
        if not (kernel.writes and kernel.writes[0] in same)
    ]


def _peak_bytes(
    program: Program, kernels: Sequence[Kernel], sizes: Sequence[np.ndarray], inside: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the most bytes of arrays that are alive at any time, inputs left out."""
    last = {number: at for at, kernel in enumerate(kernels) for number in kernel.reads}
    last |= dict.fromkeys(program.outputs, len(kernels))
    given = set(program.inputs)
    ending: dict[int, list[int]] = {}
    for number, at in last.items():
        if number not in given:
            ending.setdefault(at, []).append(number)
    alive = peak = np.zeros(1)
    for at, kernel in enumerate(kernels):
        alive = alive + sum(sizes[number] for number in kernel.writes)
        peak = np.maximum(peak, alive + inside[at])
        gone = [*ending.get(at, ()), *(number for number in kernel.writes if number not in last)]
        alive = alive - sum(sizes[number] for number in gone)
    return peak


def _add_sent(sent: _AllSent, each: Resharded, array: Array, splits: Splits) -> None:
    """Add the collectives by which an activation gets its sharding."""
    after, before = splits.mask(array.dims), splits.mask(each.before)
    summed = splits.mask(each.summed) & ~before
    whole = array.num_bytes / splits.parts(array.dims)
    # a partial sum whose result is sharded over the same axes is scattered, otherwise every device gets it
    scattered = summed & after
    for kind, over, num_bytes in (
        (REDUCE_SCATTER, scattered, whole * splits.product(scattered)),
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
