"""A traced computation as kernels over arrays with named dims, and how often layouts split these. No jax.

`trace.py` makes programs of models. Next: `program_cost.py`, what they cost on a mesh.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Dims = tuple[str | None, ...]
"""The name of each dim; None for a dim that is not sharded."""


ARRIVED = "arrived"
"""A dim of rows as they are on the devices of their experts, from all devices of the axis expert."""

ARRIVED_TOKENS = "arrived_tokens"
"""A dim of the tokens of such rows: of rows and of positions, in one."""

EXPERT_SLOTS = "expert_slots"
"""A dim of experts and of the rows that arrived for each, in one."""


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
    """An activation whose sharding may change: by a constraint, or as a sum over a sharded dim is complete.

    Args:
      array: the number of the array, as it is afterwards.
      before: the names of its dims before.
      summed: the names of the dims over which it was summed; each device that has a part of them has a part
        of the sum.
      source: the number of the array before; None if it is the same memory, as it is too where the sharding
        does not change.
      rows: the number of the array of which each device looks up or adds rows. Where all devices gather it,
        a sum that is scattered need not be sent: compilers do what sends less.
    """

    array: int
    before: Dims
    summed: tuple[str, ...] = ()
    source: int | None = None
    rows: int | None = None


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
      unrolled: whether the loop is compiled as plain code, one trip after the other.
      over: the name of the dim that the loop runs over, such as `layers`; None: it has none.
      operands: of a loop, for each input of its body the number of the array that it is a part of; of a
        call, the number of each input.
      call: of a call that is left closed, what it costs.
      looked_up: arrays of which it reads a part alone, as many elements as it writes.
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


class CallSizes(NamedTuple):
    """The arrays of a call on a device, with a number for each of several shardings.

    Args:
      reads, writes: bytes of each on one device.
      axis_sizes: mesh axis -> its size; of an axis that is not there 1.
      fuses: whether programs compute arrays elementwise in the place of others, as on GPUs.
    """

    reads: Sequence[Any]
    writes: Sequence[Any]
    axis_sizes: Callable[[str], Any]
    fuses: bool = True


class CallCost(NamedTuple):
    """What a call costs a device, with a number for each of several shardings.

    Args:
      flops: of matrix products.
      moved_bytes: to memory and from it, beside what is read and written once.
      temporary_bytes: the most that it has at once beside its inputs and results.
      sent: its collectives, as values of `cost.Sent`.
      timed_flops: as many flops of matrix products as it takes the time of; None: its own.
    """

    flops: Any
    moved_bytes: Any
    temporary_bytes: Any
    sent: Sequence[Any]
    timed_flops: Any = None


class DeviceCall(Protocol):
    """What devices compute by hand in a call that a trace leaves closed; a hashable value."""

    @property
    def linear(self) -> bool:
        """Whether parts of a sum may pass it before they are added; of its first input alone."""
        ...

    @property
    def completes(self) -> bool:
        """Whether such parts are added in its result."""
        ...

    def after(self, earlier: Iterable["DeviceCall"]) -> "DeviceCall":
        """Return the call in a program in which these come first and read the same arrays."""
        ...

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return what one call costs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Program:
    """Kernels in order, and the arrays between them.

    Args:
      arrays: all arrays.
      inputs: the numbers of those that are there before.
      outputs: the numbers of its results.
      kernels: in the order of the program.
      resharded: activations that may be sent between devices.
      num_terms: of each result how many others it is the sum of; of the gradient of a parameter that is used
        twice 2.
      for_gpus: whether its kernels are those of compilers for GPUs, see `shared_passes.py`.
    """

    arrays: tuple[Array, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    resharded: tuple[Resharded, ...] = ()
    num_terms: tuple[int, ...] = ()
    for_gpus: bool = False


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


class Splits:
    """Which axes split the dims of a program, for several shardings; each set of dims is looked up once.

    Args:
      names: all axes, sorted.
      sizes: (shardings, axes): the size of each axis; 1 where it splits nothing.
      rules: whether of parameters, dim -> (shardings, axes): whether the axis shards the dim.
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
        """Return, for each sharding, the number of parts into which something with these dims is split."""
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
