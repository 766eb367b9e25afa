"""What a traced program costs a device, for many shardings at once: time, memory, collectives. No jax.

The same program is costed for every layout: a layout says which dims are sharded, and how often. Next:
`predict.py`, the costs of a whole step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from shardtrain.plan.program import Array, Kernel, Program, Resharded


class Sharding(NamedTuple):
    """How often the dims of a program are split.

    Args:
      axes: (name of a dim, the axes of size 2 or more that shard it), for each dim that is sharded.
      of_parameters: the same for gradients of parameters.
      sizes: (axis, size) of these axes; a size need not be whole where an island has a part of a batch.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    of_parameters: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: tuple[tuple[str, float], ...]

    def of(self, dims: Iterable[str | None], *, of_parameter: bool = False) -> frozenset[str]:
        """Return the axes that shard any of these dims."""
        named = set(dims)
        rules = self.of_parameters if of_parameter else self.axes
        return frozenset(axis for dim, over in rules if dim in named for axis in over)

    def parts(self, dims: Iterable[str | None], *, of_parameter: bool = False) -> float:
        """Return the number of parts into which something with these dims is split."""
        found = self.of(dims, of_parameter=of_parameter)
        return math.prod(size for axis, size in self.sizes if axis in found)

    def array_bytes(self, array: Array) -> float:
        """Return the bytes of an array on a device."""
        return array.num_bytes / self.parts(array.dims, of_parameter=array.of_parameter)


class Sent(NamedTuple):
    """Bytes of an array, on one device, that a collective over some axes works on."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: float


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
    found: dict[int, Cost] = {}
    groups: dict[tuple[bool, ...], list[int]] = {}
    for number, sharding in enumerate(shardings):
        groups.setdefault(_changes(program, sharding), []).append(number)
    for numbers in groups.values():
        found |= zip(numbers, _alike(program, [shardings[i] for i in numbers], seconds), strict=True)
    return [found[number] for number in range(len(shardings))]


def _changes(program: Program, sharding: Sharding) -> tuple[bool, ...]:
    """Return, for each possible change of a sharding, whether it is one; in the bodies of loops too."""
    own = tuple(
        sharding.of(each.before) != sharding.of(program.arrays[each.array].dims)
        for each in program.resharded
        if each.source is not None
    )
    bodies = (kernel.body for kernel in program.kernels if kernel.body is not None)
    return own + tuple(change for body in bodies for change in _changes(body, sharding))


def _alike(program: Program, shardings: Sequence[Sharding], seconds: Seconds) -> list[Cost]:
    """Return the costs for shardings that make the same changes."""
    total = _total(program, shardings, seconds)
    return [
        Cost(
            flops=float(total.flops[i]),
            seconds=float(total.seconds[i]),
            peak_bytes=float(total.peak_bytes[i]),
            sent=tuple(total.sent[i]),
            loops=tuple(
                Loop(over, float(times[i]), float(carried[i])) for over, times, carried in total.loops
            ),
        )
        for i in range(len(shardings))
    ]


@dataclass(kw_only=True)
class _Total:
    """Costs, with a number for each sharding."""

    flops: np.ndarray
    seconds: np.ndarray
    peak_bytes: np.ndarray
    sent: list[list[Sent]]
    loops: list[tuple[str, np.ndarray, np.ndarray]]


def _total(program: Program, shardings: Sequence[Sharding], seconds: Seconds) -> _Total:
    parts = _Parts(shardings)
    sizes = [array.num_bytes / parts.of(array.dims, array.of_parameter) for array in program.arrays]
    kernels = _placed(program, shardings[0])
    zeros = np.zeros(len(shardings))
    total = _Total(flops=zeros, seconds=zeros, peak_bytes=zeros, sent=[[] for _ in shardings], loops=[])
    inside = []
    for kernel in kernels:
        if kernel.body is None:
            flops = kernel.flops / parts.of(kernel.dims)
            total.flops = total.flops + flops
            total.seconds = total.seconds + seconds(
                flops, sum(sizes[i] for i in (*kernel.reads, *kernel.writes))
            )
            inside.append(zeros)
            continue
        body = _total(kernel.body, shardings, seconds)
        # a stage of a pipeline runs its own blocks alone
        trips = kernel.trips / parts.of((kernel.over,))
        total.flops = total.flops + trips * body.flops
        total.seconds = total.seconds + trips * body.seconds
        if kernel.over is not None:
            # what a loop writes is stacked over its trips, or carried from one to the next
            carried = (i for i in kernel.writes if program.arrays[i].dims[:1] != (kernel.over,))
            total.loops.append((kernel.over, trips * body.seconds, sum((sizes[i] for i in carried), zeros)))
        for all_sent, of_body, times in zip(total.sent, body.sent, trips, strict=True):
            all_sent += [Sent(each.kind, each.axes, float(times) * each.num_bytes) for each in of_body]
        # what one trip makes is its part of what the loop makes, and is there once
        made = np.where(trips <= 1, sum((sizes[i] for i in kernel.writes), zeros), 0.0)
        inside.append(np.maximum(body.peak_bytes - made, 0.0))
    total.peak_bytes = _peak_bytes(program, kernels, sizes, inside)
    for all_sent, sharding in zip(total.sent, shardings, strict=True):
        for each in program.resharded:
            all_sent += _sent(each, program.arrays[each.array], sharding)
    return total


class _Parts:
    """The numbers of parts of dims, for several shardings; each combination of dims is looked up once."""

    def __init__(self, shardings: Sequence[Sharding]) -> None:
        self.shardings = shardings
        self.found: dict[tuple[frozenset[str | None], bool], np.ndarray] = {}

    def of(self, dims: Iterable[str | None], of_parameter: bool = False) -> np.ndarray:
        key = frozenset(dims), of_parameter
        if key not in self.found:
            split = [each.parts(key[0], of_parameter=of_parameter) for each in self.shardings]
            self.found[key] = np.array(split, float)
        return self.found[key]


def _placed(program: Program, sharding: Sharding) -> list[Kernel]:
    """Return the kernels without changes of sharding that change nothing here."""
    same = {
        each.array: each.source
        for each in program.resharded
        if each.source is not None
        and sharding.of(each.before) == sharding.of(program.arrays[each.array].dims)
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


def _sent(each: Resharded, array: Array, sharding: Sharding) -> list[Sent]:
    """Return the collectives by which an activation gets its sharding."""
    if not sharding.of((*each.summed, *each.before, *array.dims)):
        return []
    after, before = sharding.of(array.dims), sharding.of(each.before)
    summed = sharding.of(each.summed) - before
    scattered, gathered = summed & after, before - after
    whole = array.num_bytes / sharding.parts(array.dims)
    found = []
    # a partial sum whose result is sharded over the same axes is scattered, otherwise every device gets it
    if scattered:
        parts = math.prod(size for axis, size in sharding.sizes if axis in scattered)
        found.append(Sent(REDUCE_SCATTER, tuple(sorted(scattered)), whole * parts))
    if summed - scattered:
        found.append(Sent(ALL_REDUCE, tuple(sorted(summed - scattered)), whole))
    if gathered:
        found.append(Sent(ALL_GATHER, tuple(sorted(gathered)), whole))
    return found
