"""The three ways to partition a layer between two groups of devices, and what each costs. No jax.

Source: Song et al. 2020, AccPar (HPCA), sections 3 and 4: types I, II and III, tables 4 (inside a layer) and
5 (between layers). The tables follow here from the layouts of a type's input and result, which also gives
what they leave out: two layers of different ratios, and joins. Groups are a tree (section 5): unequal devices
are separated first, equal ones halved. Next: `assignment.py`, the search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardtrain.plan.layers.layer_graph import Layer
from shardtrain.plan.machine import Link, Machine

ROWS, FEATURES, WHOLE = "rows", "features", "whole"
"""Layouts of a tensor on two groups: split by the batch, split by features, a copy on each."""

TYPE_I, TYPE_II, TYPE_III = "I", "II", "III"
"""Partitions of a layer with weights: by the batch, by input features, by output features."""

LAYOUTS = {
    TYPE_I: (ROWS, ROWS),
    TYPE_II: (FEATURES, WHOLE),
    TYPE_III: (WHOLE, FEATURES),
    ROWS: (ROWS, ROWS),
    FEATURES: (FEATURES, FEATURES),
    WHOLE: (WHOLE, WHOLE),
}
"""Partition -> layouts of its input and of its result. A layer without weights keeps the layout that it gets;
`WHOLE`: both groups compute all of it. Gradients have the layouts of their tensors, computed backwards."""

WEIGHTED, UNWEIGHTED = (TYPE_I, TYPE_II, TYPE_III), (ROWS, FEATURES, WHOLE)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two groups between which layers are partitioned.

    Args:
      flops_per_second: of all its devices together.
      bytes_per_second: what all of them receive from the other group.
      latency_seconds: of each exchange.
    """

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 0.0

    def receive_seconds(self, num_bytes: float) -> float:
        """Return the seconds to receive from the other group; nothing takes none."""
        return num_bytes / self.bytes_per_second + self.latency_seconds if num_bytes > 0 else 0.0


Sides = tuple[Side, Side]


class Split(NamedTuple):
    """How a layer is partitioned.

    Args:
      way: a type, or the layout of a layer without weights.
      ratio: the part of the first group.
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
        """The parts of both groups."""
        return self.ratio, 1 - self.ratio


def partial_sum_bytes(layer: Layer, way: str) -> float:
    """Return the bytes of the partial sums that each group gets from the other (table 4).

    Type I adds up gradients of weights, II results, III gradients of inputs, if anything computed these.

    >>> from shardtrain.plan.layers.layer_graph import Source
    >>> layer = Layer(name="fc", kind="product", weight_bytes=3.0, output_bytes=2.0,
    ...               sources=(Source(layer=0, num_bytes=1.0),))
    >>> [partial_sum_bytes(layer, way) for way in ("I", "II", "III", "rows")]
    [3.0, 2.0, 1.0, 0.0]
    """
    by_way = {TYPE_I: layer.weight_bytes, TYPE_II: layer.output_bytes, TYPE_III: layer.input_bytes}
    return by_way.get(way, 0.0)


def missing(before: str, after: str, have: float, need: float) -> tuple[float, float]:
    """Return the part of a tensor that each group must get as its layout changes.

    The first group has the first rows or features, the second the others.

    Args:
      before, after: layouts.
      have, need: the part of the first group in each; of a copy it does not matter.

    Returns:
      The parts, of the whole tensor, of the first and the second group.

    >>> missing("rows", "features", 0.25, 0.25)
    (0.1875, 0.1875)
    >>> missing("rows", "whole", 0.25, 0.25), missing("rows", "rows", 0.25, 0.5)
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
      num_bytes: of the tensor.
      producer: of the layer that computes it.
      consumer: of the layer that reads it.
      sides: the groups; both exchange at once, forward before backward.
    """
    forward = missing(producer.out, consumer.into, producer.ratio, consumer.ratio)
    backward = missing(consumer.into, producer.out, consumer.ratio, producer.ratio)
    return sum(
        max(side.receive_seconds(num_bytes * part) for side, part in zip(sides, parts, strict=True))
        for parts in (forward, backward)
    )


def own_seconds(layer: Layer, split: Split, sides: Sides) -> float:
    """Return the seconds of a layer by itself: its slower group computes and gets partial sums."""
    compute = zip(sides, count_flops(layer, split), strict=True)
    sums = partial_sum_bytes(layer, split.way)
    return max(flops / side.flops_per_second + side.receive_seconds(sums) for side, flops in compute)


def count_flops(layer: Layer, split: Split) -> tuple[float, float]:
    """Return the flops of both groups in a step."""
    first, second = (1.0, 1.0) if split.way == WHOLE else split.parts
    return first * layer.step_flops, second * layer.step_flops


def ratios(layer: Layer, way: str, sides: Sides) -> tuple[float, ...]:
    """Return the parts of the first group worth trying: by speed, halves, and in balance with exchange.

    In balance, both groups are done at once (AccPar, section 5): a / c0 + s0 = (1 - a) / c1 + s1, with the
    seconds s of their partial sums.

    >>> fast, slow = Side(flops_per_second=3.0, bytes_per_second=1.0), Side(
    ...     flops_per_second=1.0, bytes_per_second=0.5)
    >>> layer = Layer(name="fc", kind="product", flops=8.0, weight_bytes=1.0)
    >>> ratios(layer, "I", (fast, slow)), ratios(layer, "I", (fast, fast))
    ((0.75, 0.5, 0.796875), (0.5,))
    """
    first, second = sides
    by_speed = first.flops_per_second / (first.flops_per_second + second.flops_per_second)
    found = [by_speed] if way == WHOLE else [by_speed, 0.5]
    sums = partial_sum_bytes(layer, way)
    waits = second.receive_seconds(sums) - first.receive_seconds(sums)
    inverse = 1 / first.flops_per_second + 1 / second.flops_per_second
    if layer.step_flops and way != WHOLE:
        balanced = (1 / second.flops_per_second + waits / layer.step_flops) / inverse
        found.append(min(max(balanced, 0.0), 1.0))
    # equal but for rounding: the first
    return tuple({round(ratio, 9): ratio for ratio in reversed(found)}.values())[::-1]


def splits(layer: Layer, sides: Sides, ways: tuple[str, ...] = WEIGHTED) -> tuple[Split, ...]:
    """Return the ways to partition a layer; a dim of less than 2 elements cannot be split, nothing: whole.

    Args:
      layer: the layer.
      sides: the groups.
      ways: the types that may be used, where it has weights.
    """
    sizes = {ROWS: layer.rows, FEATURES: layer.size_out, WHOLE: 2.0}
    sizes |= {TYPE_I: layer.rows, TYPE_II: layer.size_in, TYPE_III: layer.size_out}
    allowed = ways if layer.has_weights else UNWEIGHTED
    found = [way for way in allowed if sizes[way] >= 2] or [WHOLE]
    return tuple(Split(way, ratio) for way in found for ratio in ratios(layer, way, sides))


def parts(layers: tuple[Layer, ...], chosen: tuple[Split, ...], side: int) -> tuple[Layer, ...]:
    """Return the layers as one group has them.

    Args:
      layers: of both groups.
      chosen: how each is partitioned.
      side: 0 or 1.
    """
    return tuple(_part(layer, split, split.parts[side]) for layer, split in zip(layers, chosen, strict=True))


def _part(layer: Layer, split: Split, part: float) -> Layer:
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


def join_groups(groups: Sequence[Group], link: Link) -> Group:
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
        halves=(join_groups(groups[:at], link), join_groups(groups[at:], link)),
        name="+".join(names),
    )
