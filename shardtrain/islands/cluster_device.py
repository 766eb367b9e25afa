"""Describe the devices of a kind of islands in a cluster file, for a plan. Values only, no jax."""

import math
from dataclasses import dataclass

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse

ABOVE_ZERO = {
    "teraflops": "such as 300, or leave it out for that of the named device",
    "memory_gb": "such as 80, or leave it out for that of the named device",
    "memory_gb_per_second": "such as 2000, or leave it out for that of the named device",
    "link_gb_per_second": "such as 300, or leave it out if links cause no delay",
    "node_link_gb_per_second": "such as 25, or leave it out if the devices are in one node",
    "watts": "such as 400, or leave it out if it is not known",
}
"""Name of a value that must be above 0 -> an example, and what to do without it."""


@dataclass(frozen=True, kw_only=True)
class ClusterDevice:
    """A device, its node and its links; missing values come from the table of known devices.

    Args:
      name: name in the table of known devices, such as "NVIDIA A100-SXM4-80GB"; None if all rates are given.
      teraflops: 10**12 flops per second that matrix products reach in practice, in the dtype of the run.
      memory_gb: gigabytes of device memory.
      memory_gb_per_second: gigabytes per second that kernels read and write in practice.
      kernel_us: microseconds of an almost empty kernel; None means 5, or the value of the table.
      per_node: number of devices of a node; None means that all devices of an island are in one node.
      link_gb_per_second: gigabytes per second that a device sends to others of its node; None assumes no
        delay.
      node_link_gb_per_second: gigabytes per second that a node sends to others; a plan needs it if the
        devices are more than `per_node`.
      latency_us: microseconds of a message to another device.
      price_per_hour: price of one device, in any currency; None if unknown.
      watts: power that one device draws while it trains; None if unknown.
      simulated: whether the devices are simulated on the cores of one host, which all of them share.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    name: str | None = None
    teraflops: float | None = None
    memory_gb: float | None = None
    memory_gb_per_second: float | None = None
    kernel_us: float | None = None
    per_node: int | None = None
    link_gb_per_second: float | None = None
    node_link_gb_per_second: float | None = None
    latency_us: float = 10.0
    price_per_hour: float | None = None
    watts: float | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if not problems:
            for name in ABOVE_ZERO:
                problems += self._not_above_zero(name)
            problems += [
                f"{name} is {value}; use 0 or more"
                for name in ("kernel_us", "latency_us", "price_per_hour")
                if (value := getattr(self, name)) is not None and not 0 <= value < math.inf
            ]
            if self.per_node is not None and self.per_node < 1:
                problems.append(f"per_node is {self.per_node}; use 1 or more")
            if self.name is None and self.teraflops is None:
                problems.append("there is no name and no teraflops; give a known name, or measured rates")
        refuse("this device cannot be planned for", problems)

    def _not_above_zero(self, name: str) -> list[str]:
        value = getattr(self, name)
        if value is None or 0 < value < math.inf:
            return []
        return [f"{name} is {value}; use a number above 0, {ABOVE_ZERO[name]}"]
