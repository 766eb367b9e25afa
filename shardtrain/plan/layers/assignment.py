"""Partition all layers between two groups of devices, or over a tree of groups level by level. No jax.

Source: Song et al. 2020, AccPar (HPCA), section 5: dynamic programming over the layers, with joins, and
hierarchical partitioning. Next: `baselines.py`, other methods to compare with.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from shardtrain.plan.layers.layer_graph import Layer
from shardtrain.plan.layers.partition import (
    WEIGHTED,
    Group,
    Sides,
    Split,
    count_flops,
    exchange_seconds,
    list_splits,
    own_seconds,
    take_parts,
)

MOST_ENTRIES = 10_000_000
"""Largest number of combinations of values in one table."""


def least_sum(
    single: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]
) -> tuple[float, tuple[int, ...]]:
    """Return the least sum and a value of each variable that gives it.

    Args:
      single: cost of each value of each variable, float64 (V,).
      pairs: (variable, other variable) -> cost of each pair of their values, float64 (V, W).

    Raises:
      ValueError: too many variables depend on each other.

    >>> least_sum([np.array([0.0, 1.0]), np.array([0.0, 3.0])], {(0, 1): np.array([[5.0, 0.0], [1.0, 9.0]])})
    (2.0, (1, 0))
    """
    tables: list[tuple[tuple[int, ...], np.ndarray]] = [((i,), cost) for i, cost in enumerate(single)]
    tables += list(pairs.items())
    of_variable = {i: {n for n, (over, _) in enumerate(tables) if i in over} for i in range(len(single))}
    near: dict[int, set[int]] = {i: set() for i in range(len(single))}
    for a, b in pairs:
        near[a].add(b)
        near[b].add(a)
    size = [len(cost) for cost in single]
    width = {i: math.prod(size[j] for j in near[i]) for i in near}
    best: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    least = 0.0
    while width:
        # eliminate the variable that the fewest others depend on
        i = min(width, key=width.__getitem__)
        del width[i]
        over = (*sorted(near[i]), i)
        total = _add_tables([tables[n] for n in of_variable[i]], over, size)
        best.append((i, over[:-1], total.argmin(axis=-1)))
        rest = total.min(axis=-1)
        for j in over[:-1]:
            of_variable[j] -= of_variable[i]
            near[j] = (near[j] | set(over)) - {i, j}
        if over[:-1]:
            tables.append((over[:-1], rest))
            for j in over[:-1]:
                of_variable[j].add(len(tables) - 1)
                width[j] = math.prod(size[k] for k in near[j])
        else:
            least += float(rest)
    chosen = [0] * len(single)
    for i, over, values in reversed(best):
        chosen[i] = int(values[tuple(chosen[j] for j in over)])
    return least, tuple(chosen)


def _add_tables(
    tables: Sequence[tuple[tuple[int, ...], np.ndarray]], over: tuple[int, ...], size: Sequence[int]
) -> np.ndarray:
    """Return the sum of tables as a table over all their variables."""
    shape = [size[j] for j in over]
    if math.prod(shape) > MOST_ENTRIES:
        raise ValueError(
            f"{len(over)} layers depend on each other and have {math.prod(shape):,} partitions together;"
            f" at most {MOST_ENTRIES:,} can be compared: use devices of equal speed, or fewer paths between"
            " layers"
        )
    total = np.zeros(shape)
    for variables, cost in tables:
        order = sorted(range(len(variables)), key=lambda k: over.index(variables[k]))
        there = {variables[k]: size[variables[k]] for k in order}
        total += cost.transpose(order).reshape([there.get(j, 1) for j in over])
    return total


Layers = tuple[Layer, ...]

Chooser = Callable[[Layers, Sides, int], tuple[Split, ...]]
"""Layers, the two groups and the number of the level -> the split of each layer."""


def choose_best(
    layers: Layers, sides: Sides, level: int = 0, *, ways: tuple[str, ...] = WEIGHTED
) -> tuple[Split, ...]:
    """Choose the splits with the shortest step, of all types and ratios (`partition.list_splits`).

    Args:
      layers: the layers, in order.
      sides: the two groups.
      level: not used.
      ways: the types to choose from.
    """
    return choose_least(layers, sides, [list_splits(layer, sides, ways) for layer in layers])


def choose_least(layers: Layers, sides: Sides, choices: Sequence[Sequence[Split]]) -> tuple[Split, ...]:
    """Choose the splits with the shortest step, of the given ones for each layer."""
    single = [
        np.array([own_seconds(layer, split, sides) for split in of_layer])
        for layer, of_layer in zip(layers, choices, strict=True)
    ]
    pairs = {
        (source.layer, i): np.array(
            [
                [exchange_seconds(source.num_bytes, producer, consumer, sides) for consumer in choices[i]]
                for producer in choices[source.layer]
            ]
        )
        for i, layer in enumerate(layers)
        for source in layer.sources
    }
    _, numbers = least_sum(single, pairs)
    return tuple(of_layer[number] for of_layer, number in zip(choices, numbers, strict=True))


def estimate_exchange(layers: Layers, chosen: Sequence[Split], sides: Sides) -> float:
    """Return the seconds in which two groups exchange data in a step."""
    between = sum(
        exchange_seconds(source.num_bytes, chosen[source.layer], split, sides)
        for layer, split in zip(layers, chosen, strict=True)
        for source in layer.sources
    )
    for layer, split in zip(layers, chosen, strict=True):
        flops = zip(sides, count_flops(layer, split), strict=True)
        compute = max(number / side.flops_per_second for side, number in flops)
        between += own_seconds(layer, split, sides) - compute
    return between


@dataclass(frozen=True, kw_only=True)
class LayerPartition:
    """A partition of layers over a tree of groups.

    Args:
      group: the devices.
      chosen: the split of each layer between its two halves; () for a single device.
      halves: the partitions of the halves.
      exchange: seconds in which the two halves exchange data in a step.
      compute: seconds of each layer on its slowest device.
    """

    group: Group
    chosen: tuple[Split, ...] = ()
    halves: tuple["LayerPartition", ...] = ()
    exchange: float = 0.0
    compute: tuple[float, ...] = ()

    @cached_property
    def exchange_seconds(self) -> float:
        """Seconds in which all levels exchange data, one level after the other."""
        return self.exchange + max((half.exchange_seconds for half in self.halves), default=0.0)

    @property
    def compute_seconds(self) -> float:
        """Seconds of computation; after each layer devices wait for the slowest."""
        return sum(self.compute)

    @property
    def seconds(self) -> float:
        """Seconds of a step: nothing overlaps."""
        return self.exchange_seconds + self.compute_seconds

    @cached_property
    def levels(self) -> "tuple[LayerPartition, ...]":
        """The first group of each level, from the top."""
        return (self, *self.halves[0].levels) if self.halves else ()


def partition_layers(layers: Sequence[Layer], group: Group, choose: Chooser = choose_best) -> LayerPartition:
    """Partition layers over a tree of groups, level by level from the top.

    Args:
      layers: the layers, in order.
      group: the devices.
      choose: chooses the splits of a level.

    Raises:
      ValueError: too many layers depend on each other.
    """

    @cache
    def partition(layers: Layers, group: Group, level: int) -> LayerPartition:
        if not group.halves:
            compute = tuple(layer.step_flops / group.flops_per_second for layer in layers)
            return LayerPartition(group=group, compute=compute)
        chosen = choose(layers, group.sides, level)
        halves = tuple(
            partition(take_parts(layers, chosen, side), half, level + 1)
            for side, half in enumerate(group.halves)
        )
        return LayerPartition(
            group=group,
            chosen=chosen,
            halves=halves,
            exchange=estimate_exchange(layers, chosen, group.sides),
            compute=tuple(map(max, zip(*(half.compute for half in halves), strict=True))),
        )

    return partition(tuple(layers), group, 0)
