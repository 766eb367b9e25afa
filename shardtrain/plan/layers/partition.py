"""Split a layer between two groups of devices in one of three ways, and compute the costs of each. No jax.

Source: Song et al. 2020, AccPar (HPCA), sections 3 and 4: types I, II and III, tables 4 (inside a layer) and
5 (between layers). Here the costs follow from the layouts of a type's input and result, which also covers
layers of different ratios and joins. Groups are a tree (section 5): unequal devices are separated first,
equal ones are halved. Next: `assignment.py`, the search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardtrain.plan.layers.layer_graph import Layer
from shardtrain.plan.machine import Link, Machine

ROWS, FEATURES, WHOLE = "rows", "features", "whole"
"""Layouts of a tensor on two groups: split by the batch, split by features, or a copy on each."""

TYPE_I, TYPE_II, TYPE_III = "I", "II", "III"
"""Types of splits of a layer with weights: by the batch, by input features, by output features."""

LAYOUTS = {
    TYPE_I: (ROWS, ROWS),
    TYPE_II: (FEATURES, WHOLE),
    TYPE_III: (WHOLE, FEATURES),
    ROWS: (ROWS, ROWS),
    FEATURES: (FEATURES, FEATURES),
    WHOLE: (WHOLE, WHOLE),
}
"""Type -> layouts of input and result. A layer without weights keeps the layout of its input. `WHOLE` means
that both groups compute all of it. Gradients have the layouts of their tensors."""

WEIGHTED, UNWEIGHTED = (TYPE_I, TYPE_II, TYPE_III), (ROWS, FEATURES, WHOLE)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two groups between which layers are partitioned.

    Args:
      flops_per_second: rate of all its devices together.
      bytes_per_second: rate at which all of them receive from the other group.
      latency_seconds: latency of each exchange.
    """

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 0.0

    def receive_seconds(self, num_bytes: float) -> float:
        """Return the seconds to receive from the other group; 0 for no bytes."""
        return num_bytes / self.bytes_per_second + self.latency_seconds if num_bytes > 0 else 0.0


Sides = tuple[Side, Side]


class Split(NamedTuple):
    """How a layer is split.

    Args:
      way: a type, or the layout of a layer without weights.
      ratio: the fraction of the first group.
    """

    way: str
    ratio: float

    @property
    def into(self) -> str:
        """The layout of its input."""
        return LAYOUTS[self.way][0]

    @property
    def out(self) -> str:
        """The layout of its result."""
        return LAYOUTS[self.way][1]

    @property
    def parts(self) -> tuple[float, float]:
        """The fractions of both groups."""
        return self.ratio, 1 - self.ratio


def count_partial_sum_bytes(layer: Layer, way: str) -> float:
    """Return the bytes of partial sums that each group receives (table 4).

    Type I adds up gradients of weights, II results, and III gradients of inputs that a layer computed.

    >>> from shardtrain.plan.layers.layer_graph import Source
    >>> layer = Layer(name="fc", kind="product", weight_bytes=3.0, output_bytes=2.0,
    ...               sources=(Source(layer=0, num_bytes=1.0),))
    >>> [count_partial_sum_bytes(layer, way) for way in ("I", "II", "III", "rows")]
    [3.0, 2.0, 1.0, 0.0]
    """
    by_way = {TYPE_I: layer.weight_bytes, TYPE_II: layer.output_bytes, TYPE_III: layer.input_bytes}
    return by_way.get(way, 0.0)


def find_missing(before: str, after: str, have: float, need: float) -> tuple[float, float]:
    """Return the fractions of a tensor that the first and the second group receive as its layout changes.

    The first group has the first rows or features, the second group has the others.

    Args:
      before, after: layouts.
      have, need: fraction of the first group in each layout; ignored for copies.

    >>> find_missing("rows", "features", 0.25, 0.25)
    (0.1875, 0.1875)
    >>> find_missing("rows", "whole", 0.25, 0.25), find_missing("rows", "rows", 0.25, 0.5)
    ((0.75, 0.25), (0.25, 0.0))
    """
    if before == WHOLE:
        return 0.0, 0.0
    if after == WHOLE:
        return 1 - have, have
    if before == after:
        return max(need - have, 0.0), max(have - need, 0.0)
    return need * (1 - have), (1 - need) * have


def exchange_seconds(num_bytes: float, producer: Split, consumer: Split, sides: Sides) -> float:
    """Return the seconds to change the layout of a tensor between two layers, and of its gradient (table 5).

    Args:
      num_bytes: bytes of the tensor.
      producer: split of the layer that computes it.
      consumer: split of the layer that reads it.
      sides: the groups, which send at the same time, forward and then backward.
    """
    forward = find_missing(producer.out, consumer.into, producer.ratio, consumer.ratio)
    backward = find_missing(consumer.into, producer.out, consumer.ratio, producer.ratio)
    return sum(
        max(side.receive_seconds(num_bytes * part) for side, part in zip(sides, parts, strict=True))
        for parts in (forward, backward)
    )


def own_seconds(layer: Layer, split: Split, sides: Sides) -> float:
    """Return the seconds in which the slower group computes a layer and receives partial sums."""
    compute = zip(sides, count_flops(layer, split), strict=True)
    sums = count_partial_sum_bytes(layer, split.way)
    return max(flops / side.flops_per_second + side.receive_seconds(sums) for side, flops in compute)


def count_flops(layer: Layer, split: Split) -> tuple[float, float]:
    """Return the flops of both groups in a step."""
    first, second = (1.0, 1.0) if split.way == WHOLE else split.parts
    return first * layer.step_flops, second * layer.step_flops


def find_speed_ratio(sides: Sides) -> float:
    """Return the first group's fraction of the flops per second."""
    first, second = (side.flops_per_second for side in sides)
    return first / (first + second)


def list_ratios(layer: Layer, way: str, sides: Sides) -> tuple[float, ...]:
    """Return the fractions of the first group to try: by speed, one half, and balanced with the exchange.

    If balanced, both groups end at the same time (AccPar, section 5): a / c0 + s0 = (1 - a) / c1 + s1, with
    the seconds s of their partial sums.

    >>> fast, slow = Side(flops_per_second=3.0, bytes_per_second=1.0), Side(
    ...     flops_per_second=1.0, bytes_per_second=0.5)
    >>> layer = Layer(name="fc", kind="product", flops=8.0, weight_bytes=1.0)
    >>> list_ratios(layer, "I", (fast, slow)), list_ratios(layer, "I", (fast, fast))
    ((0.75, 0.5, 0.796875), (0.5,))
    """
    first, second = sides
    by_speed = find_speed_ratio(sides)
    found = [by_speed] if way == WHOLE else [by_speed, 0.5]
    sums = count_partial_sum_bytes(layer, way)
    waits = second.receive_seconds(sums) - first.receive_seconds(sums)
    inverse = 1 / first.flops_per_second + 1 / second.flops_per_second
    if layer.step_flops and way != WHOLE:
        balanced = (1 / second.flops_per_second + waits / layer.step_flops) / inverse
        found.append(min(max(balanced, 0.0), 1.0))
    # of equal ratios, up to rounding, keep the first
    return tuple({round(ratio, 9): ratio for ratio in reversed(found)}.values())[::-1]


def list_splits(layer: Layer, sides: Sides, ways: tuple[str, ...] = WEIGHTED) -> tuple[Split, ...]:
    """Return the possible splits of a layer; a dim with less than 2 elements cannot be split.

    Args:
      layer: the layer.
      sides: the groups.
      ways: the types to list for a layer with weights.
    """
    sizes = {ROWS: layer.rows, FEATURES: layer.size_out, WHOLE: 2.0}
    sizes |= {TYPE_I: layer.rows, TYPE_II: layer.size_in, TYPE_III: layer.size_out}
    allowed = ways if layer.has_weights else UNWEIGHTED
    found = [way for way in allowed if sizes[way] >= 2] or [WHOLE]
    return tuple(Split(way, ratio) for way in found for ratio in list_ratios(layer, way, sides))


def take_parts(layers: tuple[Layer, ...], chosen: tuple[Split, ...], side: int) -> tuple[Layer, ...]:
    """Return one group's parts of layers.

    Args:
      layers: layers of both groups.
      chosen: split of each.
      side: 0 or 1.
    """
    return tuple(
        _take_part(layer, split, split.parts[side]) for layer, split in zip(layers, chosen, strict=True)
    )


def _take_part(layer: Layer, split: Split, part: float) -> Layer:
    read, written = (1.0 if layout == WHOLE else part for layout in LAYOUTS[split.way])
    by_rows, by_input, by_output = (layout == split.way for layout in (TYPE_I, TYPE_II, TYPE_III))
    kept = by_rows or split.way == ROWS
    return replace(
        layer,
        sources=tuple(replace(source, num_bytes=source.num_bytes * read) for source in layer.sources),
        flops=layer.flops * (1.0 if split.way == WHOLE else part),
        weight_bytes=layer.weight_bytes * (part if by_input or by_output else 1.0),
        output_bytes=layer.output_bytes * written,
        rows=layer.rows * (part if kept else 1.0),
        size_in=layer.size_in * (part if by_input else 1.0),
        size_out=layer.size_out * (part if by_output or split.way == FEATURES else 1.0),
    )


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of devices in two halves.

    Args:
      devices: number of devices.
      flops_per_second: rate of all devices together.
      link: link between the halves, in each direction.
      halves: two groups; () for a single device.
      name: name of the devices.
    """

    devices: int
    flops_per_second: float
    link: Link = field(default_factory=Link)
    halves: "tuple[Group, ...]" = ()
    name: str = "device"

    @property
    def sides(self) -> Sides:
        """The halves as sides of a split."""
        first, second = (
            Side(
                flops_per_second=half.flops_per_second,
                bytes_per_second=self.link.bytes_per_second,
                latency_seconds=self.link.latency_seconds,
            )
            for half in self.halves
        )
        return first, second


def make_group(machine: Machine, devices: int, name: str = "device") -> Group:
    """Return equal devices as a tree, in which nodes are halved first, then the devices of a node.

    Halves of an odd number differ by one. The link between halves is the sum of the links of the devices, or
    nodes, of the smaller half.

    Args:
      machine: the devices and their links.
      devices: number of devices.
      name: name of the devices.

    >>> from shardtrain.plan.machine import Rates
    >>> machine = Machine(rates=Rates(flops_per_second=1.0), devices_per_node=2)
    >>> [half.devices for half in make_group(machine, 6).halves]
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
        halves=(make_group(machine, first, name), make_group(machine, devices - first, name)),
        name=name,
    )


def join_groups(groups: Sequence[Group], link: Link) -> Group:
    """Return islands as one tree, in which kinds are separated first, then equal islands are halved.

    Args:
      groups: the group of each island, equal ones next to each other.
      link: link of an island to others.
    """
    if len(groups) == 1:
        return groups[0]
    # separate kinds, or halve equal islands
    changes = [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]]
    middle = len(groups) / 2
    at = min(changes, key=lambda i: abs(i - middle)) if changes else len(groups) // 2
    number = min(at, len(groups) - at)
    names = dict.fromkeys(group.name for group in groups)
    return Group(
        devices=sum(group.devices for group in groups),
        flops_per_second=sum(group.flops_per_second for group in groups),
        link=Link(bytes_per_second=number * link.bytes_per_second, latency_seconds=link.latency_seconds),
        halves=(join_groups(groups[:at], link), join_groups(groups[at:], link)),
        name="+".join(names),
    )
