"""The best partition of a run's layers on a cluster, beside the ways that others use.

Next: `report/plan_layers.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain.plan.devices import GB
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.layers.as_mesh import TENSOR_DIMS
from shardtrain.plan.layers.assignment import Hierarchy, Layers, Partitioned
from shardtrain.plan.layers.baselines import BASELINES, mesh_levels
from shardtrain.plan.layers.groups import Group, group_of, joined
from shardtrain.plan.layers.layer_graph import Layer
from shardtrain.plan.machine import Link

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
    return joined(islands, link)


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
