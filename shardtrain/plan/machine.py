"""The machine of a plan: rates of its devices, and links between them. No jax.

`devices.py` has the rates of known devices; a cluster file may set others (`islands/cluster_device.py`).
Next: `predict.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardtrain.errors.messages import near
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.plan.devices import DEVICES, GB, TERA, ReachedRates, find_device
from shardtrain.plan.hlo.collectives import ALL_REDUCE, PERMUTE
from shardtrain.plan.traffic import count_sent_bytes
from shardtrain.sharding.axis_sizes import MOST_DEVICES

INSIDE, BETWEEN = "link inside nodes", "link between nodes"
"""Names of the links of a machine."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of one device to others.

    Args:
      bytes_per_second: bytes that a device sends per second, in one direction.
      latency_seconds: latency of each message.
    """

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device as programs reach them.

    Args:
      flops_per_second: flops of matrix products per second, in the dtype of the run.
      memory_bytes_per_second: bytes that kernels read and write per second.
      kernel_seconds: seconds of a tiny kernel.
      memory_bytes: device memory. inf means unknown.
      copies_stacked: whether XLA for CPU compiles the programs: loops copy parts of stacked arrays, more
        arrays are alive at once (`CallSizes.fuses`), and the optimizer's state is copied before its update.
    """

    flops_per_second: float
    memory_bytes_per_second: float = math.inf
    kernel_seconds: float = 0.0
    memory_bytes: float = math.inf
    copies_stacked: bool = False

    def seconds(self, flops: Any, moved_bytes: Any) -> Any:
        """Return the seconds of a kernel by the roofline model (Williams et al. 2009).

        >>> float(Rates(flops_per_second=100.0, memory_bytes_per_second=10.0).seconds(200.0, 10.0))
        2.0
        """
        return self.kernel_seconds + np.maximum(
            flops / self.flops_per_second, moved_bytes / self.memory_bytes_per_second
        )

    def stacking_seconds(self, written_bytes: Any, read_bytes: Any) -> Any:
        """Return the seconds in which a loop writes and reads stacked arrays, one part in each trip.

        A stacked result is filled with zeros before the loop, and each trip copies its part into it. A trip
        also copies the parts that it reads. A copy reads and writes.

        >>> rates = Rates(flops_per_second=1.0, memory_bytes_per_second=10.0, copies_stacked=True)
        >>> rates.stacking_seconds(10.0, 0.0), rates.stacking_seconds(0.0, 10.0)
        (3.0, 2.0)
        """
        if not self.copies_stacked:
            return 0.0 * written_bytes
        return (3 * written_bytes + 2 * read_bytes) / self.memory_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal devices of one island, on nodes.

    Args:
      rates: rates of one device.
      devices_per_node: number of devices that the faster link connects.
      device_link: link between devices of a node.
      node_link: link of a node to others, which its devices share.
      peak_flops_per_second: peak of a device by its data sheet, in the dtype of the run; the rate that
        programs reach if the peak is unknown.
      simulated: whether the devices share the cores of one host. Waiting for other devices then costs
        nothing, as they compute on these cores.
    """

    rates: Rates
    devices_per_node: int = MOST_DEVICES
    device_link: Link = Link()
    node_link: Link = Link()
    peak_flops_per_second: float | None = None
    simulated: bool = False

    def link(self, over: Sequence[str], sizes: Mapping[str, int]) -> Link:
        """Return the link that limits a ring over some axes.

        Devices are numbered with the last axis of the mesh fastest, and a node has consecutive devices. The
        rings of a node's devices share its link.

        Args:
          over: mesh axes.
          sizes: axis -> size, the slowest link first.
        """
        order = [axis for axis in sizes if sizes[axis] > 1]
        members = [axis for axis in order if axis in over]
        if not members:
            return Link()
        reach = math.prod(sizes[axis] for axis in order[order.index(members[0]) :])
        everything = math.prod(sizes[axis] for axis in order)
        if everything <= self.devices_per_node or self.devices_per_node % reach == 0:
            return self.device_link
        # members of a ring are as far apart as the faster axes have devices; the devices between them belong
        # to other rings, which use the link of the node too
        distance = math.prod(sizes[axis] for axis in order[order.index(members[-1]) + 1 :])
        of_ring = max(self.devices_per_node // distance, 1)
        share = self.node_link.bytes_per_second * of_ring / self.devices_per_node
        inside = self.device_link.bytes_per_second if of_ring > 1 else math.inf
        return Link(bytes_per_second=min(share, inside), latency_seconds=self.node_link.latency_seconds)

    def find_link_name(self, over: Sequence[str], sizes: Mapping[str, int]) -> str:
        """Return the name of the link that limits a ring over some axes, `INSIDE` or `BETWEEN`."""
        return INSIDE if self.link(over, sizes) == self.device_link else BETWEEN

    def collective_seconds(
        self, kind: str, over: Sequence[str], sizes: Mapping[str, int], payload_bytes: float, times: float = 1
    ) -> float:
        """Return the seconds of a ring collective.

        Args:
          kind: as in `plan.hlo.collectives`.
          over: mesh axes.
          sizes: axis -> size.
          payload_bytes: bytes of the whole array on the devices of one ring, over all runs.
          times: number of runs.
        """
        members = math.prod(sizes.get(axis, 1) for axis in over)
        if members == 1:
            return 0.0
        link = self.link(over, sizes)
        rounds = 1 if kind == PERMUTE else (members - 1) * (2 if kind == ALL_REDUCE else 1)
        return (
            times * rounds * link.latency_seconds
            + count_sent_bytes(kind, members, payload_bytes) / link.bytes_per_second
        )


def make_simulated_machine(host: Machine, num_devices: int, num_cores: int) -> Machine:
    """Return the machine of simulated devices, which share the rates of a host.

    A small kernel and a message are the work of one core.

    Args:
      host: rates of a single device that uses the whole host.
      num_devices: number of simulated devices.
      num_cores: number of cores of the host.

    >>> host = Machine(rates=Rates(flops_per_second=80.0, kernel_seconds=1.0))
    >>> one = make_simulated_machine(host, 8, 2).rates
    >>> one.flops_per_second, one.kernel_seconds, one.copies_stacked
    (10.0, 4.0, True)
    """
    rates, link = host.rates, host.device_link
    by_core = num_devices / min(num_cores, num_devices)
    link = Link(
        bytes_per_second=link.bytes_per_second / num_devices, latency_seconds=link.latency_seconds * by_core
    )
    rates = replace(
        rates,
        flops_per_second=rates.flops_per_second / num_devices,
        memory_bytes_per_second=rates.memory_bytes_per_second / num_devices,
        kernel_seconds=rates.kernel_seconds * by_core,
        copies_stacked=True,
    )
    return Machine(rates=rates, device_link=link, node_link=link, simulated=True)


OF_MEMORY = 0.85
"""Fraction of a device's memory that a plan uses; the rest is for the runtime and for prediction errors."""


def make_machine(device: ClusterDevice, devices: int, *, in_float32: bool, nodes: int = 1) -> Machine:
    """Return the machine that a cluster file describes.

    Args:
      device: one device and its links.
      devices: number of devices of an island.
      in_float32: whether the model computes in float32.
      nodes: number of nodes of an island, over which its devices are spread evenly.

    Raises:
      ValueError: the device is not in the table, or has no rate in this dtype, and the file sets none; or
        there are several nodes by `per_node`, and no link between them.
    """
    _check_node_link(device, devices)
    known = None if device.name is None else find_device(device.name)
    if device.name is not None and known is None and device.teraflops is None:
        names = [each.kind for each in DEVICES]
        raise ValueError(
            f"device {near(device.name, names)}; or give its teraflops, memory_gb and memory_gb_per_second"
        )
    flops, peak, reached = None if device.teraflops is None else device.teraflops * TERA, None, ReachedRates()
    moved, memory = _count_bytes(device.memory_gb_per_second), _count_bytes(device.memory_gb)
    if known is not None:
        in_16_bits = known.matrix_flops_per_second or known.float16_flops_per_second
        peak = known.float32_flops_per_second if in_float32 else in_16_bits
        if flops is None and peak is None:
            dtype = "float32" if in_float32 else "16 bits"
            raise ValueError(f"the table has no rate of {known.kind} in {dtype}; give its teraflops")
        # no device was measured in float32
        products = reached.products if in_float32 else known.reached.products
        flops, reached = products * (peak or 0.0) if flops is None else flops, known.reached
        if device.memory_gb_per_second is None:
            moved = reached.memory * known.memory_bytes_per_second
        if device.memory_gb is None:
            memory = known.memory_bytes
    assert flops is not None
    rates = Rates(
        flops_per_second=flops,
        memory_bytes_per_second=moved,
        kernel_seconds=reached.kernel_seconds if device.kernel_us is None else device.kernel_us * 1e-6,
        memory_bytes=OF_MEMORY * memory,
        copies_stacked=device.simulated,
    )
    latency = device.latency_us * 1e-6
    return Machine(
        rates=rates,
        devices_per_node=device.per_node or max(devices // nodes, 1),
        device_link=Link(bytes_per_second=_count_bytes(device.link_gb_per_second), latency_seconds=latency),
        node_link=Link(
            bytes_per_second=_count_bytes(device.node_link_gb_per_second), latency_seconds=latency
        ),
        peak_flops_per_second=peak or flops,
        simulated=device.simulated,
    )


def _check_node_link(device: ClusterDevice, devices: int) -> None:
    """Refuse nodes without a link: messages between them would take no time."""
    if device.per_node is not None and device.per_node < devices and device.node_link_gb_per_second is None:
        raise ValueError(
            f"{devices} devices, {device.per_node} per node, are on {-(-devices // device.per_node)} nodes,"
            " and what a node sends to others is not given; give --node-link, in GB/s, such as --node-link 25"
            " (in a cluster file node_link_gb_per_second = 25)"
        )


def _count_bytes(gigabytes: float | None) -> float:
    return math.inf if gigabytes is None else gigabytes * GB
