"""Read the collectives of a compiled program from its text, with their axes, counts and bytes.

`text.py` parses the syntax, `dataflow.py` follows loops and values, `replica_groups.py` reads device groups.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardtrain.plan.hlo.dataflow import COPIES, Frame, find_trip_count, find_values
from shardtrain.plan.hlo.replica_groups import Groups, find_axes, find_device_groups, parse_list
from shardtrain.plan.hlo.text import Array, Instruction, parse

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"
BROADCAST = "collective-broadcast"
RAGGED_ALL_TO_ALL = "ragged-all-to-all"

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, RAGGED_ALL_TO_ALL, PERMUTE, BROADCAST)
"""Every kind of collective, by XLA's name."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of the compiled program."""

    name: str
    trip_count: int
    source: str
    """The traced operation it came from, such as `jit(step)/while`."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation of a compiled program."""

    kind: str
    """One of `KINDS`. An all-reduce is a reduce-scatter if each device keeps only its own slice."""
    axes: tuple[str, ...]
    """Mesh axes along which data moves, in the order of the mesh."""
    group_size: int
    """Number of devices that exchange data with each other; for a permutation, of devices along `axes`."""
    count: int
    """Number of runs in one call of the program: once per iteration of the `loops` around it."""
    payload_bytes: int
    """Bytes of the array in one run: reduced, gathered, or exchanged by a device."""
    wire_bytes_per_device: float
    """Bytes that a device sends over all runs, averaged over all devices, with ring algorithms. In a
    permutation only the sources send."""
    dtype: str
    """Element type on the wire, as in HLO: `f32`, `bf16`."""
    loops: tuple[Loop, ...]
    """The loops around it, the outermost first."""
    source: str
    """The traced operation it came from, as jax names it; empty where XLA kept none."""

    @property
    def in_loop(self) -> bool:
        """Whether it runs inside a loop."""
        return bool(self.loops)


def collectives(hlo_text: str, axis_sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program.

    Combined operations are split by kind and dtype. For each kind and axes, the most expensive branch of a
    conditional counts, as an upper bound. Axes of size 1 never appear.

    Args:
        hlo_text: what `jax.jit(f).lower(...).compile().as_text()` returns.
        axis_sizes: size of each mesh axis, slowest first, as in `dict(mesh.shape)`.

    Returns:
        Collectives in the order of the program.

    Raises:
        ValueError: the axis sizes do not multiply to the devices of the program, or the trip count of a loop
            that contains a collective is unknown.
    """
    module = parse(hlo_text)
    num_devices = math.prod(axis_sizes.values())
    if module.num_devices != num_devices:
        listed = ", ".join(f"{name}={size}" for name, size in axis_sizes.items() if size > 1) or "all 1"
        raise ValueError(
            f"axis sizes {listed} make {num_devices} devices, but the program was compiled for"
            f" {module.num_devices}. Pass dict(mesh.shape) of the mesh that it was compiled for."
        )
    # walk from the entry into every called computation, as a run of the program does
    frame = Frame(module=module, computation=module.entry)
    return tuple(_Reader(axis_sizes=axis_sizes).read(frame))


def sum_by_axis(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """Sum collectives of one kind over the same axes.

    Args:
        found: from `collectives`.

    Returns:
        (kind, axes) -> (runs, bytes sent per device).
    """
    sums: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for collective in found:
        key = (collective.kind, collective.axes)
        count, wire_bytes = sums.get(key, (0, 0.0))
        sums[key] = (count + collective.count, wire_bytes + collective.wire_bytes_per_device)
    return sums


@dataclass(frozen=True, kw_only=True)
class _Reader:
    axis_sizes: Mapping[str, int]
    fused_channels: set[str] = field(default_factory=set)
    """Channels read inside fusions. XLA for TPU repeats an asynchronous collective, with the same channel, in
    each fusion that continues it, some of them in loops; only the first in the program starts it."""

    def read(self, frame: Frame) -> Iterator[Collective]:
        """Yield the collectives of one run of a frame."""
        is_fused = frame.caller is not None and frame.caller.opcode == "fusion"
        for instruction in frame.computation.instructions.values():
            inner = frame.callee(instruction)
            if instruction.opcode.removesuffix("-start") in KINDS:
                if not (is_fused and self._continues(instruction)):
                    yield from self._split_parts(frame, instruction)
            elif instruction.opcode == "while":
                yield from self._repeat(frame, instruction)
            elif instruction.opcode == "conditional":
                yield from self._most_expensive(frame, instruction)
            elif inner is not None:
                yield from self.read(inner)
            elif instruction.opcode == "send" and (
                # to another device or slice, not to its own host
                "megascale" in instruction.attributes or "is_host_transfer=true" not in instruction.attributes
            ):
                raise ValueError(
                    f"instruction {instruction.name} sends data by a transfer of its own, whose receivers the"
                    " text does not name. Counted are collectives inside one slice: compile for a topology"
                    " with num_slices=1."
                )

    def _continues(self, instruction: Instruction) -> bool:
        """Return whether a collective in a fusion continues one that has been read."""
        channel = instruction.attribute("channel_id")
        continues = channel in self.fused_channels
        if channel is not None:
            self.fused_channels.add(channel)
        return continues

    def _repeat(self, frame: Frame, loop: Instruction) -> Iterator[Collective]:
        """Yield the collectives of a loop, multiplied by its trip count."""
        # a loop without collectives may have any trip count
        body = tuple(self.read(frame.body(loop)))
        condition = tuple(self.read(frame.condition(loop)))
        if not body and not condition:
            return
        rounds = find_trip_count(frame, loop)
        if rounds is None:
            inside = {f"{found.kind} over {'+'.join(found.axes)}" for found in body + condition}
            raise ValueError(
                f"loop {loop.name} ({loop.source or 'no source noted'}) contains {', '.join(sorted(inside))},"
                " and the text does not tell how often it runs. Counted are loops with a fixed number of"
                " iterations: use lax.scan, or lax.fori_loop with Python integers as bounds, in place of"
                " lax.while_loop."
            )
        # the condition is evaluated once more than the body
        around = Loop(name=loop.name, trip_count=rounds, source=loop.source)
        for times, part in ((rounds, body), (rounds + 1, condition)):
            for collective in part:
                yield replace(
                    collective,
                    count=collective.count * times,
                    wire_bytes_per_device=collective.wire_bytes_per_device * times,
                    loops=(around, *collective.loops),
                )

    def _most_expensive(self, frame: Frame, conditional: Instruction) -> Iterator[Collective]:
        """Yield, for each kind and axes, the collectives of the branch that sends most."""
        branches = [tuple(self.read(branch)) for branch in frame.branches(conditional)]
        # which branch runs is known only at run time: take the most expensive, as an upper bound
        sums = [sum_by_axis(branch) for branch in branches]
        for key in dict.fromkeys(key for branch in sums for key in branch):
            branch = max(range(len(branches)), key=lambda index: sums[index].get(key, (0, 0.0))[1])
            yield from (found for found in branches[branch] if (found.kind, found.axes) == key)

    def _split_parts(self, frame: Frame, instruction: Instruction) -> Iterator[Collective]:
        """Yield the parts of one collective instruction, by kind (all-reduce or reduce-scatter) and dtype."""
        kind = instruction.opcode.removesuffix("-start")
        # which devices communicate, as mesh axes; a group of one device sends nothing
        groups = find_device_groups(instruction, frame.module.num_devices)
        axes = find_axes(groups, self.axis_sizes)
        if not axes:
            return
        group_size = max(len(group) for group in groups)
        # of a permute not every device sends
        senders = sum(len(set(group)) > 1 for group in groups) / frame.module.num_devices
        # operands of a combined all-reduce count as reduce-scatter if each device keeps only its slice
        parts: dict[tuple[str, str], int] = {}
        for part, array in enumerate(_operand_arrays(frame, instruction)):
            scattered = kind == ALL_REDUCE and is_scattered(frame, instruction, part, array, groups)
            key = (REDUCE_SCATTER if scattered else kind, array.dtype)
            parts[key] = parts.get(key, 0) + array.num_bytes
        for (kind, dtype), operand_bytes in parts.items():
            # an all-gather's operand is one shard of the payload
            payload_bytes = operand_bytes * group_size if kind == ALL_GATHER else operand_bytes
            yield Collective(
                kind=kind,
                axes=axes,
                group_size=math.prod(self.axis_sizes[a] for a in axes) if kind == PERMUTE else group_size,
                count=1,
                payload_bytes=payload_bytes,
                wire_bytes_per_device=(
                    senders * payload_bytes
                    if kind == PERMUTE
                    else _wire_bytes(kind, payload_bytes, group_size)
                ),
                dtype=dtype,
                loops=(),
                source=instruction.source,
            )


def _wire_bytes(kind: str, payload_bytes: int, group_size: int) -> float:
    """Return the bytes that a device of a group sends in one run; a broadcast goes along a ring."""
    passes = 2 if kind == ALL_REDUCE else 1
    return passes * (group_size - 1) / group_size * payload_bytes


def _operand_arrays(frame: Frame, instruction: Instruction) -> list[Array]:
    """Return the arrays that a device contributes, without buffers that are only written."""
    instructions = frame.computation.instructions
    first = instructions[instruction.operands[0]].arrays
    slices = instruction.find_braced("slice_sizes")
    if slices is not None:
        return [Array(dtype=first[0].dtype, sizes=sizes) for sizes in parse_list(slices)]
    if instruction.opcode.startswith(RAGGED_ALL_TO_ALL):
        return list(first)
    return [array for operand in instruction.operands for array in instructions[operand].arrays]


_PASS_ON = COPIES | {"all-reduce-done", "convert", "transpose"}


def is_scattered(frame: Frame, all_reduce: Instruction, part: int, array: Array, groups: Groups) -> bool:
    """Return whether each device uses only its own 1/n of one operand of an all-reduce.

    Args:
        frame: where the all-reduce is.
        all_reduce: the instruction, which may combine several arrays.
        part: index of the operand.
        array: dtype and sizes of that operand.
        groups: groups of n devices that reduce together.

    Returns:
        True if every use, through copies, fusions and calls, is a slice of 1/n with a different start on each
        device of a group; False also if the text does not determine it.
    """
    element = part if len(all_reduce.operands) > 1 else None
    return _is_only_sliced(frame, all_reduce.name, element, array, groups)


def _is_only_sliced(frame: Frame, name: str, element: int | None, array: Array, groups: Groups) -> bool:
    """Return whether all uses of a value are such slices; `element` is None unless the value is a tuple."""
    uses = [
        _slices(frame, user, name, element, array, groups)
        for user in frame.computation.users.get(name, ())
        if element is None or user.opcode != "get-tuple-element" or user.index == element
    ]
    if frame.computation.root.name == name:
        # follow the result of a fusion or call; a result of a loop or branch may have any use
        caller, parent = frame.caller, frame.parent
        if caller is None or parent is None or parent.callee(caller) is None:
            return False
        uses.append(_is_only_sliced(parent, caller.name, element, array, groups))
    return bool(uses) and all(uses)


def _slices(
    frame: Frame, user: Instruction, name: str, element: int | None, array: Array, groups: Groups
) -> bool:
    """Return whether a use takes such a slice, directly or after passing the value on."""
    if user.opcode == "get-tuple-element":
        return _is_only_sliced(frame, user.name, None, array, groups)
    if user.opcode in _PASS_ON:
        return _is_only_sliced(frame, user.name, element, array, groups)
    if user.opcode == "dynamic-slice":
        return _slices_differ(frame, user, array, groups)
    # a fusion or call: look at the uses of the parameters that it gets the value by
    inner = frame.callee(user)
    if inner is None:
        return False
    parameters = inner.computation.parameters
    return all(
        _is_only_sliced(inner, parameters[number].name, element, array, groups)
        for number, operand in enumerate(user.operands)
        if operand == name
    )


def _slices_differ(frame: Frame, user: Instruction, array: Array, groups: Groups) -> bool:
    """Return whether the devices of each group take n different slices of 1/n."""
    # the slices of a group must have 1/n each, and start at different places
    if any(user.arrays[0].num_elements * len(group) != array.num_elements for group in groups):
        return False
    starts = find_values(frame, user.operands[1:])
    if starts is None:
        return False
    start_of = np.stack(starts, axis=1)
    return all(len(np.unique(start_of[list(group)], axis=0)) == len(group) for group in groups)
