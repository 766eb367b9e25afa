"""Devices as a tree of groups, each of two halves: what layers are partitioned between. No jax.

Source: Song et al. 2020, AccPar (HPCA), section 5: unequal devices are separated first, equal ones halved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.plan.layers.partition import Side, Sides
from shardtrain.plan.machine import Link, Machine

NO_LINK = Link()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices, in two halves.

    Args:
      devices: their number.
      flops_per_second: of all together.
      link: what the first half sends to the second; each of the halves gets as much.
      halves: two groups; () for a single device.
      name: of the devices.
    """

    devices: int
    flops_per_second: float
    link: Link = NO_LINK
    halves: "tuple[Group, ...]" = ()
    name: str = "device"

    @property
    def sides(self) -> Sides:
        """The halves, as layers are partitioned between them."""
        first, second = (
            Side(
                flops_per_second=half.flops_per_second,
                bytes_per_second=self.link.bytes_per_second,
                latency_seconds=self.link.latency_seconds,
            )
            for half in self.halves
        )
        return first, second


def group_of(machine: Machine, devices: int, name: str = "device") -> Group:
    """Return equal devices as a tree: nodes are halved first, then the devices of a node.

    Halves of an odd number differ by one. What a half sends is the links of the devices, or nodes, of the
    smaller half together.

    Args:
      machine: the devices and their links.
      devices: how many.
      name: of the devices.

    >>> from shardtrain.plan.machine import Rates
    >>> machine = Machine(rates=Rates(flops_per_second=1.0), devices_per_node=2)
    >>> [half.devices for half in group_of(machine, 6).halves]
    [2, 4]
    """
    flops = machine.rates.flops_per_second
    if devices == 1:
        return Group(devices=1, flops_per_second=flops, name=name)
    nodes, left = divmod(devices, machine.devices_per_node)
    if nodes >= 1 and devices > machine.devices_per_node:
        nodes += bool(left)
        first = nodes // 2 * machine.devices_per_node
        link, number = machine.node_link, nodes // 2
    else:
        first = number = devices // 2
        link = machine.device_link
    return Group(
        devices=devices,
        flops_per_second=devices * flops,
        link=Link(bytes_per_second=number * link.bytes_per_second, latency_seconds=link.latency_seconds),
        halves=(group_of(machine, first, name), group_of(machine, devices - first, name)),
        name=name,
    )


def joined(groups: Sequence[Group], link: Link) -> Group:
    """Return islands as one tree: kinds are separated first, then equal islands are halved.

    Args:
      groups: one for each island, equal ones side by side.
      link: of an island to others.
    """
    if len(groups) == 1:
        return groups[0]
    # where kinds change, or in the middle of equal ones
    changes = [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]]
    middle = len(groups) / 2
    at = min(changes, key=lambda i: abs(i - middle)) if changes else len(groups) // 2
    number = min(at, len(groups) - at)
    names = dict.fromkeys(group.name for group in groups)
    return Group(
        devices=sum(group.devices for group in groups),
        flops_per_second=sum(group.flops_per_second for group in groups),
        link=Link(bytes_per_second=number * link.bytes_per_second, latency_seconds=link.latency_seconds),
        halves=(joined(groups[:at], link), joined(groups[at:], link)),
        name="+".join(names),
    )
