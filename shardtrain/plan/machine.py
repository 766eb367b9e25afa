"""The machine that a plan is for: rates of its devices, and links between them. No jax.

Rates of known devices are in `devices.py`; a cluster file may say others (`islands/cluster.py`). Next: `predict.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain import axes
from shardtrain.plan.hlo.collectives import ALL_REDUCE
from shardtrain.plan.traffic import sent_bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of one device to others.

    Args:
      bytes_per_second: what a device sends, in one direction.
      latency_seconds: of each message.
    """

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device does by itself, as a program gets it, not as a data sheet says.

    Args:
      flops_per_second: of matrix products, in the dtype of the run.
      memory_bytes_per_second: read and written by kernels.
      kernel_seconds: of a kernel that does next to nothing.
      memory_bytes: device memory; inf: not known.
    """

    flops_per_second: float
    memory_bytes_per_second: float = math.inf
    kernel_seconds: float = 0.0
    memory_bytes: float = math.inf

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Return the seconds of a kernel: the roofline of this device (Williams et al. 2009).

        >>> Rates(flops_per_second=100.0, memory_bytes_per_second=10.0).seconds(200.0, 10.0)
        2.0
        """
        return self.kernel_seconds + max(
            flops / self.flops_per_second, moved_bytes / self.memory_bytes_per_second
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal devices of one island, on nodes.

    Args:
      rates: of one device.
      devices_per_node: number of devices that have the faster link to each other.
      device_link: between devices of a node.
      node_link: of a node to others, which its devices share.
    """

    rates: Rates
    devices_per_node: int = 1 << 30
    device_link: Link = Link()
    node_link: Link = Link()

    def link(self, over: Sequence[str], sizes: Mapping[str, int]) -> Link:
        """Return the link by which a ring over these axes is limited.

        Devices are numbered with the last axis of the mesh fastest, and nodes have consecutive ones. A node whose
        devices are in several rings at once shares its link among them.

        Args:
          over: mesh axes.
          sizes: axis -> size.
        """
        order = [axis for axis in axes.AXES if sizes.get(axis, 1) > 1]
        inner = [axis for axis in order if axis in over]
        if not inner:
            return Link()
        slowest = order.index(inner[0])
        reach = math.prod(sizes[axis] for axis in order[slowest:])
        if reach <= self.devices_per_node:
            return self.device_link
        # the other axes inside a node make rings of their own, which share the node's link
        members = math.prod(sizes[axis] for axis in order[slowest:] if axis in over)
        rings = min(reach, self.devices_per_node) // max(min(members, self.devices_per_node), 1)
        return Link(
            bytes_per_second=self.node_link.bytes_per_second / max(rings, 1),
            latency_seconds=self.node_link.latency_seconds,
        )

    def collective_seconds(
        self, kind: str, over: Sequence[str], sizes: Mapping[str, int], payload_bytes: float, times: float = 1
    ) -> float:
        """Return the seconds of a ring collective.

        Args:
          kind: as in `plan.hlo.collectives`.
          over: mesh axes.
          sizes: axis -> size.
          payload_bytes: of the whole array on the devices of one ring, over all times.
          times: how often it runs.
        """
        members = math.prod(sizes.get(axis, 1) for axis in over)
        if members == 1:
            return 0.0
        link = self.link(over, sizes)
        rounds = (members - 1) * (2 if kind == ALL_REDUCE else 1)
        return (
            times * rounds * link.latency_seconds
            + sent_bytes(kind, members, payload_bytes) / link.bytes_per_second
        )
