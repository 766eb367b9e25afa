"""How often the dims of a program are split, for many layouts at once, in NumPy. No jax.

Next: `program_cost.py`, which costs a program for all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


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
