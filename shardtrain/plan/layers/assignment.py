"""Partition all layers between two groups of devices, and a tree of groups level by level. No jax.

Source: Song et al. 2020, AccPar (HPCA), section 5: dynamic programming over the layers, with joins, and
hierarchical partitioning. Next: `baselines.py`, the ways to compare with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardtrain.plan.layers.groups import Group
from shardtrain.plan.layers.layer_graph import Layer, check_order
from shardtrain.plan.layers.least_sum import least_sum
from shardtrain.plan.layers.partition import (
    WEIGHTED,
    Sides,
    Split,
    computed,
    exchange_seconds,
    own_seconds,
    parts,
    splits,
)

Layers = tuple[Layer, ...]

Chooser = Callable[[Layers, Sides, int], tuple[Split, ...]]
"""Layers, the two groups and the number of the level -> how each layer is partitioned."""


def exact(
    layers: Layers, sides: Sides, level: int = 0, *, ways: tuple[str, ...] = WEIGHTED
) -> tuple[Split, ...]:
    """Partition layers so that a step is as short as can be, of all types and ratios (`partition.splits`).

    Args:
      layers: in order.
      sides: the two groups.
      level: not used.
      ways: the types that may be used.
    """
    return least(layers, sides, [splits(layer, sides, ways) for layer in layers])


def least(layers: Layers, sides: Sides, choices: Sequence[Sequence[Split]]) -> tuple[Split, ...]:
    """Return the splits of the shortest step, of those that are given for each layer."""
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


def exchanged_seconds(layers: Layers, chosen: Sequence[Split], sides: Sides) -> float:
    """Return the seconds of all that two groups exchange in a step."""
    between = sum(
        exchange_seconds(source.num_bytes, chosen[source.layer], split, sides)
        for layer, split in zip(layers, chosen, strict=True)
        for source in layer.sources
    )
    return between + sum(
        own_seconds(layer, split, sides) - _compute_seconds(layer, split, sides)
        for layer, split in zip(layers, chosen, strict=True)
    )


def step_seconds(layers: Layers, chosen: Sequence[Split], sides: Sides) -> float:
    """Return the seconds of a step on two groups: what the search minimises."""
    return exchanged_seconds(layers, chosen, sides) + sum(
        _compute_seconds(layer, split, sides) for layer, split in zip(layers, chosen, strict=True)
    )


def _compute_seconds(layer: Layer, split: Split, sides: Sides) -> float:
    return max(
        flops / side.flops_per_second for side, flops in zip(sides, computed(layer, split), strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """Layers on a tree of groups.

    Args:
      group: the devices.
      chosen: how the layers are partitioned between its two halves; () for a single device.
      halves: the halves with their layers.
      exchange: seconds that the two halves exchange in a step.
      compute: seconds of each layer on its slowest device.
    """

    group: Group
    chosen: tuple[Split, ...] = ()
    halves: tuple["Partitioned", ...] = ()
    exchange: float = 0.0
    compute: tuple[float, ...] = ()

    @cached_property
    def exchange_seconds(self) -> float:
        """Seconds of what all levels exchange, one level after the other."""
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
    def levels(self) -> "tuple[Partitioned, ...]":
        """One group of each level, from the top: where halves differ, the first."""
        return (self, *self.halves[0].levels) if self.halves else ()


@dataclass(kw_only=True)
class Hierarchy:
    """Partitions layers on a tree of groups, level by level from the top; equal groups once.

    Args:
      choose: how the layers of a level are partitioned.
    """

    choose: Chooser = exact
    _found: dict[tuple[Group, Layers], Partitioned] = field(default_factory=dict, init=False, repr=False)

    def partition(self, layers: Sequence[Layer], group: Group, level: int = 0) -> Partitioned:
        """Partition layers.

        Args:
          layers: in order.
          group: the devices.
          level: of the group in the tree.

        Raises:
          ValueError: a layer reads a later one, or too many depend on each other.
        """
        if not level:
            check_order(layers)
        key = group, tuple(layers)
        if key not in self._found:
            self._found[key] = self._partition(key[1], group, level)
        return self._found[key]

    def _partition(self, layers: Layers, group: Group, level: int) -> Partitioned:
        if not group.halves:
            compute = tuple(layer.step_flops / group.flops_per_second for layer in layers)
            return Partitioned(group=group, compute=compute)
        chosen = self.choose(layers, group.sides, level)
        halves = tuple(
            self.partition(parts(layers, chosen, side), half, level + 1)
            for side, half in enumerate(group.halves)
        )
        return Partitioned(
            group=group,
            chosen=chosen,
            halves=halves,
            exchange=exchanged_seconds(layers, chosen, group.sides),
            compute=tuple(map(max, zip(*(half.compute for half in halves), strict=True))),
        )
