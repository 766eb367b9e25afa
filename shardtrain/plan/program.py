"""Types of a traced computation: kernels over arrays with named dims, and how layouts split the dims. No jax.

`trace.py` makes programs of models. Next: `program_cost.py`, which computes their costs on a mesh.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Dims = tuple[str | None, ...]
"""The name of each dim; None for a dim that is not sharded."""


ARRIVED = "arrived"
"""Name of the dim of rows that the devices of their experts received from all devices of the axis expert."""

ARRIVED_TOKENS = "arrived_tokens"
"""Name of the dim of the tokens of such rows: it joins rows and positions."""

EXPERT_SLOTS = "expert_slots"
"""Name of the dim that joins experts and the rows that arrived for each."""


@dataclass(frozen=True, kw_only=True)
class Array:
    """An array of a program, unsharded.

    Args:
      shape: in elements.
      item_bytes: bytes of an element.
      dims: the name of each dim.
      of_parameter: whether it is the gradient of a parameter, which is sharded as the parameters.
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
class Resharding:
    """A change of sharding of an activation, by a constraint or by completing a sum over a sharded dim.

    Args:
      array: number of the array after the change.
      before: names of its dims before the change.
      summed: names of the dims that it was summed over; devices that share them have partial sums.
      source: number of the array before the change; None if it has the same memory.
      rows: number of the array whose rows each device looks up or adds. If all devices gather this array, a
        scattered sum need not be sent; compilers choose what sends fewer bytes.
    """

    array: int
    before: Dims
    summed: tuple[str, ...] = ()
    source: int | None = None
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of a device: a matrix product, a convolution, a chain of elementwise operations, a loop.

    Args:
      name: name of its primitive.
      reads: numbers of the arrays that it reads.
      writes: numbers of the arrays that it writes.
      flops: flops of the unsharded operation.
      dims: names of all dims that its work grows with.
      body: the program of a loop; reads and writes are then the ones of the whole loop.
      trips: number of trips of the loop.
      unrolled: whether the loop is compiled as plain code.
      over: name of the dim that the loop runs over, such as `layers`.
      operands: for each input of a loop's body, the number of the array that it is a part of; for a call, the
        number of each input.
      call: costs of a call by devices.
      looked_up: numbers of arrays from which it reads only as many elements as it writes.
      scope: name of the model's operator to which it belongs; "" if that is not known.
      recomputes: whether it is in a program that runs again in the backward pass (`jax.checkpoint`).
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    dims: frozenset[str] = frozenset()
    body: "Program | None" = None
    trips: int = 1
    unrolled: bool = False
    over: str | None = None
    operands: tuple[int, ...] = ()
    call: "DeviceCall | None" = None
    looked_up: tuple[int, ...] = ()
    scope: str = ""
    recomputes: bool = False


class CallSizes(NamedTuple):
    """Sizes of the arrays of a call on a device, for each of several shardings.

    Args:
      reads, writes: bytes of each array on one device.
      axis_sizes: mesh axis -> size; 1 for an axis that the mesh lacks.
      fuses: whether elementwise operations reuse the memory of their inputs, as on GPUs.
    """

    reads: Sequence[Any]
    writes: Sequence[Any]
    axis_sizes: Callable[[str], Any]
    fuses: bool = True


class CallCost(NamedTuple):
    """Costs of a call on a device, for each of several shardings.

    Args:
      flops: flops of matrix products.
      moved_bytes: bytes read from and written to memory, in addition to reading inputs and writing results.
      temporary_bytes: largest memory at any time, in addition to inputs and results.
      sent: its collectives, as values of `prediction.Sent`.
      timed_flops: flops of matrix products that take the same time. None means `flops`.
    """

    flops: Any
    moved_bytes: Any
    temporary_bytes: Any
    sent: Sequence[Any]
    timed_flops: Any = None


class DeviceCall(Protocol):
    """A call that devices compute by their own code and a trace does not enter; a hashable value."""

    @property
    def linear(self) -> bool:
        """Whether partial sums may be its first input and then be its results."""
        ...

    @property
    def completes(self) -> bool:
        """Whether it completes such sums."""
        ...

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return the costs of one call."""
        ...


@dataclass(frozen=True, kw_only=True)
class Program:
    """Kernels in order, and the arrays between them.

    Args:
      arrays: all arrays.
      inputs: numbers of its inputs.
      outputs: numbers of its results.
      kernels: the kernels, in order.
      reshardings: changes of sharding of activations.
      num_terms: number of arrays that are added up to each result, such as 2 for the gradient of a parameter
        that is used twice.
      for_gpus: whether its kernels are fused as by compilers for GPUs.
      sums: arrays whose sum jax takes, of the derivative of what is read several times.
    """

    arrays: tuple[Array, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    reshardings: tuple[Resharding, ...] = ()
    num_terms: tuple[int, ...] = ()
    for_gpus: bool = False
    sums: tuple[tuple[int, ...], ...] = ()


class Sharding(NamedTuple):
    """How the dims of a program are split.

    Args:
      axes: (name of a dim, axes of size 2 or more that shard it) of each sharded dim.
      of_parameters: the same for gradients of parameters.
      sizes: (axis, size) of these axes; a size may be fractional, as an island has a part of a batch.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...]
    of_parameters: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: tuple[tuple[str, float], ...]


class Splits:
    """Which axes split the dims of a program, for each of several shardings.

    Args:
      names: all axes, sorted.
      sizes: (shardings, axes) size of each axis; 1 if it splits nothing.
      rules: (whether of parameters, dim) -> (shardings, axes) whether the axis shards the dim.
    """

    def __init__(
        self, names: tuple[str, ...], sizes: np.ndarray, rules: Mapping[tuple[bool, str], np.ndarray]
    ) -> None:
        self.names, self.sizes, self.rules = names, sizes, rules
        self._masks: dict[tuple[frozenset[str | None], bool], np.ndarray] = {}
        self._parts: dict[tuple[frozenset[str | None], bool], np.ndarray] = {}

    @classmethod
    def of(cls, shardings: Sequence[Sharding]) -> "Splits":
        """Return the splits of these shardings."""
        names = tuple(sorted({axis for each in shardings for axis, _ in each.sizes}))
        column = {axis: i for i, axis in enumerate(names)}
        sizes = np.ones((len(shardings), len(names)))
        rules: dict[tuple[bool, str], np.ndarray] = {}
        for row, each in enumerate(shardings):
            for axis, size in each.sizes:
                sizes[row, column[axis]] = size
            for of_parameter, named in ((False, each.axes), (True, each.of_parameters)):
                for dim, over in named:
                    if (of_parameter, dim) not in rules:
                        rules[of_parameter, dim] = np.zeros(sizes.shape, bool)
                    rules[of_parameter, dim][row, [column[axis] for axis in over]] = True
        return cls(names, sizes, rules)

    def take(self, numbers: np.ndarray) -> "Splits":
        """Return the splits of some of the shardings."""
        return Splits(
            self.names, self.sizes[numbers], {key: mask[numbers] for key, mask in self.rules.items()}
        )

    def mask(self, dims: Iterable[str | None], of_parameter: bool = False) -> np.ndarray:
        """Return (shardings, axes): whether the axis shards any of these dims."""
        key = frozenset(dims), of_parameter
        if key not in self._masks:
            nothing = np.zeros(self.sizes.shape, bool)
            found = [self.rules.get((of_parameter, dim), nothing) for dim in key[0] if dim is not None]
            self._masks[key] = np.logical_or.reduce([nothing, *found])
        return self._masks[key]

    def parts(self, dims: Iterable[str | None], of_parameter: bool = False) -> np.ndarray:
        """Return, for each sharding, the number of parts into which an array with these dims is split."""
        key = frozenset(dims), of_parameter
        if key not in self._parts:
            self._parts[key] = self.product(self.mask(*key))
        return self._parts[key]

    def axis_sizes(self, axis: str) -> np.ndarray:
        """Return, for each sharding, the size of an axis; 1 where it splits nothing."""
        return self.sizes[:, self.names.index(axis)] if axis in self.names else np.ones(len(self.sizes))

    def product(self, mask: np.ndarray) -> np.ndarray:
        """Return, for each sharding, the product of the sizes of the axes of a mask."""
        return np.where(mask, self.sizes, 1.0).prod(axis=1)

    def differ(self, before: Iterable[str | None], after: Iterable[str | None]) -> np.ndarray:
        """Return, for each sharding, whether two sets of dims are split over different axes."""
        return (self.mask(before) != self.mask(after)).any(axis=1)
