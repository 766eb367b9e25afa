"""Compare methods to partition a run's layers on a cluster, and find the mesh that runs a partition.

Next: `report/plan_layers.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain import axes
from shardtrain.plan.devices import GB
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.layers.assignment import LayerPartition, Layers, partition_layers
from shardtrain.plan.layers.baselines import BASELINES, COPIES, find_tensor_type, mesh_levels
from shardtrain.plan.layers.layer_graph import Layer
from shardtrain.plan.layers.partition import (
    TYPE_I,
    TYPE_II,
    TYPE_III,
    WHOLE,
    Group,
    Split,
    join_groups,
    make_group,
)
from shardtrain.plan.machine import Link
from shardtrain.sharding.rules import PARAMETER_RULES

TENSOR_DIMS = frozenset(dim for dim, over in PARAMETER_RULES.items() if axes.TENSOR in over)
"""Dims that the default rules shard over the axis tensor."""


class NoMesh(ValueError):
    """No mesh runs a partition; the message explains why."""


@dataclass(frozen=True, kw_only=True)
class EquivalentMesh:
    """A mesh that runs a partition.

    Args:
      data: size of the axis data.
      tensor: size of the axis tensor.
      dims: names of the dims that the axis tensor shards.
    """

    data: int
    tensor: int
    dims: frozenset[str]

    @property
    def by_default(self) -> bool:
        """Whether the default rules shard these dims."""
        return self.tensor == 1 or self.dims == TENSOR_DIMS


def find_mesh(layers: Layers, found: LayerPartition) -> EquivalentMesh:
    """Return the mesh that runs a partition.

    A mesh axis shards either the batch or dims by their names, for all layers and in equal parts, with the
    batch in the outer levels.

    Args:
      layers: the layers of the model.
      found: their partition.

    Raises:
      NoMesh: no mesh does.
    """
    levels = [level.chosen for level in found.levels]
    if not is_even(found):
        by_rows = all(split.way == TYPE_I for chosen in levels for _, split in _weighted(layers, chosen))
        islands = (
            "islands run it, which take rows by --shares" if by_rows else "the devices of a mesh are equal"
        )
        raise NoMesh(f"parts are unequal; {islands}")
    data_levels = 0
    while data_levels < len(levels) and all(
        split.way == TYPE_I for layer, split in _weighted(layers, levels[data_levels])
    ):
        data_levels += 1
    if data_levels == len(levels):
        return EquivalentMesh(data=2**data_levels, tensor=1, dims=TENSOR_DIMS)
    tensor_levels = levels[data_levels:]
    for number, chosen in enumerate(tensor_levels, data_levels):
        if all(split.way == WHOLE for _, split in _weighted(layers, chosen)):
            devices = found.levels[number].halves[0].group.devices
            raise NoMesh(f"level {number} computes all layers on both halves: use {devices} of its devices")
        by_rows = [layer.name for layer, split in _weighted(layers, chosen) if split.way == TYPE_I]
        if by_rows:
            raise NoMesh(
                f"level {number} splits {len(by_rows)} layers by the batch, such as {by_rows[0]}, and others"
                " by features: an axis of a mesh does one of both for all layers"
            )
    of_levels = [(layer, split) for chosen in tensor_levels for layer, split in _weighted(layers, chosen)]
    # use the default rules if they give these types, else the dims that these types split
    split_dims = {
        dim
        for layer, split in of_levels
        for dim in {TYPE_II: layer.dims_in, TYPE_III: layer.dims_out}.get(split.way, ())
    }
    for dims in (TENSOR_DIMS, frozenset(split_dims)):
        if all(find_tensor_type(layer, dims) == split.way for layer, split in of_levels):
            return EquivalentMesh(data=2**data_levels, tensor=2 ** len(tensor_levels), dims=dims)
    raise NoMesh("layers with the same dims are split differently, and rules for dims treat them alike")


def _weighted(layers: Layers, chosen: Sequence[Split]) -> list[tuple[Layer, Split]]:
    return [(layer, split) for layer, split in zip(layers, chosen, strict=True) if layer.has_weights]


def is_even(found: LayerPartition) -> bool:
    """Return whether the halves are equal on all levels."""
    even = all(math.isclose(split.ratio, 0.5) for split in found.chosen)
    alike = not found.halves or found.halves[0] == found.halves[1]
    return even and alike and all(map(is_even, found.halves[:1]))


MEGATRON = "megatron"
"""Name of the method with tensor inside a node and data between nodes."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Partitions of a model's layers on a cluster.

    Args:
      layers: the layers of the model, for the whole batch.
      ways: name of a method -> its partition.
    """

    layers: Layers
    ways: Mapping[str, LayerPartition]

    @property
    def best(self) -> str:
        """The name of the fastest method, which need not be a search, as a search decides level by level."""
        return min(self.ways, key=lambda name: self.ways[name].seconds)

    @property
    def best_without_copies(self) -> str:
        """The name of the fastest method that gives each device work of its own."""
        return min(self.ways.keys() - {COPIES}, key=lambda name: self.ways[name].seconds)


def cluster_group(plan: ClusterPlan, link_gb_per_second: float | None) -> Group:
    """Return the devices of a planned cluster as a tree of kinds of islands, islands, nodes and devices.

    Args:
      plan: the plan, with the devices and machine of each kind.
      link_gb_per_second: rate between islands. None means that sending takes no time.
    """
    link = Link() if link_gb_per_second is None else Link(bytes_per_second=link_gb_per_second * GB)
    islands = [
        make_group(each.machine, each.kind.devices or 1, each.kind.kind)
        for each in plan.kinds
        for _ in range(each.kind.count)
    ]
    return join_groups(islands, link)


def plan_layers(layers: Sequence[Layer], group: Group, devices_per_node: int) -> LayerPlan:
    """Partition layers by each method.

    Args:
      layers: the layers of the model.
      group: the devices.
      devices_per_node: number of devices that Megatron's method gives to the axis tensor.
    """
    fixed = tuple(layers)
    choosers = dict(BASELINES)
    if any(TENSOR_DIMS & {*layer.dims_in, *layer.dims_out} for layer in fixed):
        choosers[MEGATRON] = mesh_levels(count_levels_above(group, devices_per_node), TENSOR_DIMS)
    ways = {name: partition_layers(fixed, group, choose) for name, choose in choosers.items()}
    return LayerPlan(layers=fixed, ways=ways)


def count_levels_above(group: Group, devices: int) -> int:
    """Count the levels, from the top, whose groups have more than a number of devices."""
    if not group.halves or group.devices <= devices:
        return 0
    return 1 + max(count_levels_above(half, devices) for half in group.halves)
