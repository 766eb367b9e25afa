"""The machine that a plan is for: rates of its devices, and links between them. No jax.

Rates of known devices are in `devices.py`; a cluster file may say others (`islands/cluster_device.py`).
Next: `predict.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardtrain.errors.messages import near
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.plan.devices import DEVICES, GB, TERA, Reached, find_device
from shardtrain.plan.hlo.collectives import ALL_REDUCE, PERMUTE
from shardtrain.plan.traffic import count_sent_bytes
from shardtrain.sharding.axis_sizes import MOST_DEVICES


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
      copies_stacked: whether loops copy what their trips read from stacked arrays and write to them, as
        programs of XLA for CPU do; they also have more arrays at once (`CallSizes.fuses`)
        and copy the optimizer's state before a step that may be skipped.
    """

    flops_per_second: float
    memory_bytes_per_second: float = math.inf
    kernel_seconds: float = 0.0
    memory_bytes: float = math.inf
    copies_stacked: bool = False

    def seconds(self, flops: Any, moved_bytes: Any) -> Any:
        """Return the seconds of a kernel, or of each of several: the roofline (Williams et al. 2009).

        >>> float(Rates(flops_per_second=100.0, memory_bytes_per_second=10.0).seconds(200.0, 10.0))
        2.0
        """
        return self.kernel_seconds + np.maximum(
            flops / self.flops_per_second, moved_bytes / self.memory_bytes_per_second
        )

    def stacking_seconds(self, written_bytes: Any, read_bytes: Any) -> Any:
        """Return the seconds in which a loop writes and reads stacked arrays, one part in each trip.

        A stacked result is filled with zeros before the loop, then each trip copies its part into it; what a
        trip reads is copied out of the stack. A copy reads and writes.

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
      rates: of one device.
      devices_per_node: number of devices that have the faster link to each other.
      device_link: between devices of a node.
      node_link: of a node to others, which its devices share.
      peak_flops_per_second: of a device by its data sheet, in the dtype of the run; where that is not known,
        what it really reaches.
      simulated: whether the devices share the cores of one host, with rates that are the share of one: what a
        device waits for others then costs nothing, as they compute meanwhile on its cores.
    """

    rates: Rates
    devices_per_node: int = MOST_DEVICES
    device_link: Link = Link()
    node_link: Link = Link()
    peak_flops_per_second: float | None = None
    simulated: bool = False

    def link(self, over: Sequence[str], sizes: Mapping[str, int]) -> Link:
        """Return the link by which a ring over these axes is limited.

        Devices are numbered with the last axis of the mesh fastest, and nodes have consecutive ones. The
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
        # a ring has members at a distance of as many devices as the faster axes have; the devices between
        # them belong to other rings, all of which leave the node by its link
        distance = math.prod(sizes[axis] for axis in order[order.index(members[-1]) + 1 :])
        of_ring = max(self.devices_per_node // distance, 1)
        share = self.node_link.bytes_per_second * of_ring / self.devices_per_node
        inside = self.device_link.bytes_per_second if of_ring > 1 else math.inf
        return Link(bytes_per_second=min(share, inside), latency_seconds=self.node_link.latency_seconds)

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
        rounds = 1 if kind == PERMUTE else (members - 1) * (2 if kind == ALL_REDUCE else 1)
        return (
            times * rounds * link.latency_seconds
            + count_sent_bytes(kind, members, payload_bytes) / link.bytes_per_second
        )


def make_simulated_machine(host: Machine, num_devices: int, num_cores: int) -> Machine:
    """Return one of several simulated devices, from what a host does with all of its cores.

    All devices together do what the host does. A small kernel and a message are the work of one core.

    Args:
      host: rates of a single device that has the host to itself.
      num_devices: simulated devices.
      num_cores: of the host.

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
"""The part of a device's memory that a plan fills: the rest is for the runtime and for wrong predictions."""


def make_machine(device: ClusterDevice, devices: int, *, in_float32: bool, nodes: int = 1) -> Machine:
    """Return the machine that a cluster file describes.

    Args:
      device: one device and its links.
      devices: of an island.
      in_float32: whether the model computes in float32.
      nodes: of an island, which has as many devices on each.

    Raises:
      ValueError: the device is not in the table, or has no rate for this dtype, and none is given.
    """
    known = None if device.name is None else find_device(device.name)
    if device.name is not None and known is None and device.teraflops is None:
        names = [each.kind for each in DEVICES]
        raise ValueError(
            f"device {near(device.name, names)}; or give its teraflops, memory_gb and memory_gb_per_second"
        )
    flops, peak = None if device.teraflops is None else device.teraflops * TERA, None
    if known is not None:
        in_16_bits = known.matrix_flops_per_second or known.float16_flops_per_second
        peak = known.float32_flops_per_second if in_float32 else in_16_bits
        if flops is None and peak is None:
            dtype = "float32" if in_float32 else "16 bits"
            raise ValueError(f"the table has no rate of {known.kind} in {dtype}; give its teraflops")
        # in float32 nothing was measured
        reached = Reached() if in_float32 else known.reached
        flops = reached.products * (peak or 0.0) if flops is None else flops
    assert flops is not None
    moved, memory = device.memory_gb_per_second, device.memory_gb
    kernel = None if device.kernel_us is None else device.kernel_us * 1e-6
    if known is not None:
        moved = known.reached.memory * known.memory_bytes_per_second / GB if moved is None else moved
        memory = known.memory_bytes / GB if memory is None else memory
        kernel = known.reached.kernel_seconds if kernel is None else kernel
    rates = Rates(
        flops_per_second=flops,
        memory_bytes_per_second=_bytes(moved),
        kernel_seconds=Reached().kernel_seconds if kernel is None else kernel,
        memory_bytes=OF_MEMORY * _bytes(memory),
        copies_stacked=device.simulated,
    )
    latency = device.latency_us * 1e-6
    return Machine(
        rates=rates,
        devices_per_node=device.per_node or max(devices // nodes, 1),
        device_link=Link(bytes_per_second=_bytes(device.link_gb_per_second), latency_seconds=latency),
        node_link=Link(bytes_per_second=_bytes(device.node_link_gb_per_second), latency_seconds=latency),
        peak_flops_per_second=peak or flops,
        simulated=device.simulated,
    )


def _bytes(gigabytes: float | None) -> float:
    return math.inf if gigabytes is None else gigabytes * GB
