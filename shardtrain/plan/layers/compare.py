"""The best partition of a run's layers on a cluster, beside others' ways, and the mesh that runs it.

Next: `report/plan_layers.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain import axes
from shardtrain.plan.devices import GB
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.layers.assignment import Hierarchy, Layers, Partitioned
from shardtrain.plan.layers.baselines import BASELINES, mesh_levels, tensor_way
from shardtrain.plan.layers.layer_graph import Layer
from shardtrain.plan.layers.partition import (
    TYPE_I,
    TYPE_II,
    TYPE_III,
    WHOLE,
    Group,
    Split,
    group_of,
    join_groups,
)
from shardtrain.plan.machine import Link
from shardtrain.sharding.rules import PARAMETER_RULES

TENSOR_DIMS = frozenset(dim for dim, over in PARAMETER_RULES.items() if axes.TENSOR in over)
"""Dims that the default rules shard over the axis tensor."""


class NoMesh(ValueError):
    """No mesh runs a partition; the text says why."""


@dataclass(frozen=True, kw_only=True)
class AsMesh:
    """A mesh that runs a partition.

    Args:
      data: size of the axis data.
      tensor: size of the axis tensor.
      dims: that the axis tensor shards.
    """

    data: int
    tensor: int
    dims: frozenset[str]

    @property
    def by_default(self) -> bool:
        """Whether the default rules do."""
        return self.tensor == 1 or self.dims == TENSOR_DIMS


def find_mesh(layers: Layers, found: Partitioned) -> AsMesh:
    """Return the mesh that runs a partition.

    A mesh axis shards the batch, or dims by their names; so each level has to be one of both for all layers,
    in equal parts, with the batch in the outer levels.

    Args:
      layers: of the model.
      found: their partition.

    Raises:
      NoMesh: none does.
    """
    levels = [level.chosen for level in found.levels]
    if not _is_even(found):
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
        return AsMesh(data=2**data_levels, tensor=1, dims=TENSOR_DIMS)
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
    # the default rules if they give these types, else the dims that these types split
    split_dims = {dim for layer, split in of_levels for dim in _dims(layer.dims_in, layer.dims_out, split)}
    for dims in (TENSOR_DIMS, frozenset(split_dims)):
        if all(tensor_way(layer, dims) == split.way for layer, split in of_levels):
            return AsMesh(data=2**data_levels, tensor=2 ** len(tensor_levels), dims=dims)
    raise NoMesh("layers with the same dims are split differently, and rules for dims treat them alike")


def _weighted(layers: Layers, chosen: Sequence[Split]) -> list[tuple[Layer, Split]]:
    return [(layer, split) for layer, split in zip(layers, chosen, strict=True) if layer.has_weights]


def _dims(dims_in: tuple[str, ...], dims_out: tuple[str, ...], split: Split) -> tuple[str, ...]:
    return {TYPE_II: dims_in, TYPE_III: dims_out}.get(split.way, ())


def _is_even(found: Partitioned) -> bool:
    """Whether all halves are equal, on all levels."""
    even = all(math.isclose(split.ratio, 0.5) for split in found.chosen)
    alike = not found.halves or found.halves[0] == found.halves[1]
    return even and alike and all(map(_is_even, found.halves[:1]))


MEGATRON = "megatron"
"""Name of the way with tensor inside a node and data between nodes."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Layers on the devices of a cluster.

    Args:
      layers: of the model, for the whole batch.
      ways: name -> the partition.
    """

    layers: Layers
    ways: Mapping[str, Partitioned]

    @property
    def best(self) -> str:
        """The name of the fastest way; a search decides level by level, so it may be one of the others."""
        return min(self.ways, key=lambda name: self.ways[name].seconds)


def cluster_group(plan: ClusterPlan, link_gb_per_second: float | None) -> Group:
    """Return the devices of a planned cluster as a tree: kinds of islands, islands, nodes, devices.

    Args:
      plan: what says each kind's devices and machine.
      link_gb_per_second: what an island sends to others; None: at once.
    """
    link = Link() if link_gb_per_second is None else Link(bytes_per_second=link_gb_per_second * GB)
    islands = [
        group_of(each.machine, each.kind.devices or 1, each.kind.kind)
        for each in plan.kinds
        for _ in range(each.kind.count)
    ]
    return join_groups(islands, link)


def plan_layers(layers: Sequence[Layer], group: Group, devices_per_node: int) -> LayerPlan:
    """Partition layers by each way.

    Args:
      layers: of the model.
      group: the devices.
      devices_per_node: devices that Megatron's way gives to the axis tensor.
    """
    fixed = tuple(layers)
    choosers = dict(BASELINES)
    if any(TENSOR_DIMS & {*layer.dims_in, *layer.dims_out} for layer in fixed):
        choosers[MEGATRON] = mesh_levels(levels_above(group, devices_per_node), TENSOR_DIMS)
    ways = {name: Hierarchy(choose=choose).partition(fixed, group) for name, choose in choosers.items()}
    return LayerPlan(layers=fixed, ways=ways)


def levels_above(group: Group, devices: int) -> int:
    """Return how many levels, from the top, have groups of more than so many devices."""
    if not group.halves or group.devices <= devices:
        return 0
    return 1 + max(levels_above(half, devices) for half in group.halves)
