"""A traced computation as kernels over arrays with named dims, and what it costs on a mesh. No jax.

The same program is costed for every layout: a layout says which dims are sharded, and how often. `trace.py`
makes programs of models. Next: `predict.py`, the costs of a whole step.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

Dims = tuple[str | None, ...]
"""The name of each dim; None for a dim that is not sharded."""


@dataclass(frozen=True, kw_only=True)
class Array:
    """An array of a program, unsharded.

    Args:
      shape: in elements.
      item_bytes: bytes of an element.
      dims: the name of each dim.
      of_parameter: whether it is the gradient of a parameter, which is sharded as parameters are.
    """

    shape: tuple[int, ...]
    item_bytes: int
    dims: Dims
    of_parameter: bool = False

    @property
    def num_bytes(self) -> float:
        """Bytes of the unsharded array."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class Resharded:
    """An activation whose sharding may change: by a constraint, or since a sum over a sharded dim is complete.

    Args:
      array: the number of the array, as it is afterwards.
      before: the names of its dims before.
      summed: the names of the dims over which it was summed; each device that has a part of them has a part
        of the sum.
      source: the number of the array before; None if it is the same memory. Where the sharding does not change,
        it is the same memory too.
    """

    array: int
    before: Dims
    summed: tuple[str, ...] = ()
    source: int | None = None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a device does at once: a matrix product, a convolution, a fused chain of elementwise operations.

    Args:
      name: of its primitive.
      reads: the numbers of the arrays that it reads.
      writes: the numbers of the arrays that it writes.
      flops: of the unsharded operation.
      dims: the names of all dims that its work is over.
      body: the program of a loop; then reads and writes are those of the whole loop.
      trips: how often the loop runs.
      over: the name of the dim that the loop runs over, such as `layers`; None: it has none.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    dims: frozenset[str] = frozenset()
    body: "Program | None" = None
    trips: int = 1
    over: str | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """Kernels in order, and the arrays between them.

    Args:
      arrays: all arrays.
      inputs: the numbers of those that are there before.
      outputs: the numbers of its results.
      kernels: in the order of the program.
      resharded: activations that may be sent between devices.
    """

    arrays: tuple[Array, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    resharded: tuple[Resharded, ...] = ()


class Sharding(NamedTuple):
    """How often the dims of a program are split.

    Args:
      axes: name of a dim -> the axes of size 2 or more that shard it.
      sizes: axis -> size.
      of_parameters: the same as axes, for gradients of parameters.
    """

    axes: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    of_parameters: Mapping[str, tuple[str, ...]]

    def of(self, dims: Iterable[str | None]) -> frozenset[str]:
        """Return the axes that shard any of these dims."""
        return frozenset(axis for dim in dims if dim for axis in self.axes.get(dim, ()))

    def parts(self, dims: Iterable[str | None]) -> int:
        """Return the number of parts into which something with these dims is split."""
        return math.prod(self.sizes[axis] for axis in self.of(dims))

    def array_bytes(self, array: Array) -> float:
        """Return the bytes of an array on a device."""
        rules = self.of_parameters if array.of_parameter else self.axes
        split = {axis for dim in array.dims if dim for axis in rules.get(dim, ())}
        return array.num_bytes / math.prod(self.sizes[axis] for axis in split)


class Sent(NamedTuple):
    """Bytes of an array, on one device, that a collective over some axes works on."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: float


@dataclass(kw_only=True)
class Cost:
    """What one run of a program costs a device.

    Args:
      flops: of matrix products and convolutions.
      moved_bytes: read from and written to memory.
      seconds: by the `seconds` that `cost` was given.
      peak_bytes: the most memory for results and temporary arrays at any time, without inputs.
      sent: collectives of activations.
      loops: for each loop over a named dim, that name and the loop's part of the seconds, in order.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    seconds: float = 0.0
    peak_bytes: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    loops: list[tuple[str, float]] = field(default_factory=list)


def cost(program: Program, sharding: Sharding, seconds: Callable[[float, float], float]) -> Cost:
    """Return what one run of a program costs a device.

    Args:
      program: the program.
      sharding: how its dims are split.
      seconds: (flops, bytes moved) -> seconds of one kernel on a device.
    """
    sizes = [sharding.array_bytes(array) for array in program.arrays]
    kernels = _placed(program, sharding)
    found = Cost()
    inside = []
    for kernel in kernels:
        if kernel.body is None:
            flops = kernel.flops / sharding.parts(kernel.dims)
            moved = sum(sizes[number] for number in (*kernel.reads, *kernel.writes))
            found.flops += flops
            found.moved_bytes += moved
            found.seconds += seconds(flops, moved)
            inside.append(0.0)
            continue
        body = cost(kernel.body, sharding, seconds)
        # a stage of a pipeline runs its own blocks alone
        trips = kernel.trips / sharding.parts((kernel.over,))
        found.flops += trips * body.flops
        found.moved_bytes += trips * body.moved_bytes
        found.seconds += trips * body.seconds
        found.loops += [(kernel.over, trips * body.seconds)] if kernel.over else []
        found.sent += [Sent(*each[:2], trips * each.num_bytes) for each in body.sent]
        # what one trip makes is its part of what the loop makes, and is there once
        made = sum(sizes[number] for number in kernel.writes) if trips <= 1 else 0.0
        inside.append(max(body.peak_bytes - made, 0.0))
    found.peak_bytes = _peak_bytes(program, kernels, sizes, inside)
    for each in program.resharded:
        found.sent += _sent(each, program.arrays[each.array], sharding)
    return found


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
    program: Program, kernels: Sequence[Kernel], sizes: Sequence[float], inside: Sequence[float]
) -> float:
    """Return the most bytes of arrays that are alive at any time, inputs left out."""
    last = {number: at for at, kernel in enumerate(kernels) for number in kernel.reads}
    last |= dict.fromkeys(program.outputs, len(kernels))
    given = set(program.inputs)
    ending: dict[int, list[int]] = {}
    for number, at in last.items():
        if number not in given:
            ending.setdefault(at, []).append(number)
    alive = peak = 0.0
    for at, kernel in enumerate(kernels):
        alive += sum(sizes[number] for number in kernel.writes)
        peak = max(peak, alive + inside[at])
        alive -= sum(sizes[number] for number in ending.get(at, ()))
        alive -= sum(sizes[number] for number in kernel.writes if number not in last)
    return peak


def _sent(each: Resharded, array: Array, sharding: Sharding) -> list[Sent]:
    """Return the collectives by which an activation gets its sharding."""
    after, before = sharding.of(array.dims), sharding.of(each.before)
    summed = sharding.of(each.summed) - before
    scattered, gathered = summed & after, before - after
    whole = array.num_bytes / sharding.parts(array.dims)
    found = []
    # a partial sum whose result is sharded over the same axes is scattered, otherwise every device gets it
    if scattered:
        parts = math.prod(sharding.sizes[axis] for axis in scattered)
        found.append(Sent(REDUCE_SCATTER, tuple(sorted(scattered)), whole * parts))
    if summed - scattered:
        found.append(Sent(ALL_REDUCE, tuple(sorted(summed - scattered)), whole))
    if gathered:
        found.append(Sent(ALL_GATHER, tuple(sorted(gathered)), whole))
    return found
