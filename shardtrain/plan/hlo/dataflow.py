"""Where the values of a compiled program come from: frames, origins and integers per device.

Looks through copies, fusions, calls and values that a loop hands on unchanged. Serves two questions:
how often a loop runs (`trip_count.py`), and which slice each device keeps (`reduce_scatter.py`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardtrain.plan.hlo.text import Computation, Instruction, Module

COPIES = frozenset({"bitcast", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape"})
"""Operations that pass the value of their first operand on."""

_CALLEES = {"fusion": "calls", "call": "to_apply", "async-start": "calls"}
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "multiply": np.multiply,
    "divide": np.floor_divide,
    "remainder": np.remainder,
    "and": np.bitwise_and,
    "shift-right-logical": np.right_shift,
    "select": np.where,
    "clamp": lambda low, middle, high: np.clip(middle, low, high),
}
_COMPARISONS = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A computation as one instruction runs it.

    `arguments` name the values of its parameters in the parent frame. In a loop `carry` is the loop's
    body: only what the body hands on unchanged still has the value that it had before the loop.
    """

    module: Module
    computation: Computation
    parent: "Frame | None" = None
    caller: Instruction | None = None
    arguments: tuple[str, ...] = ()
    carry: Computation | None = None

    def callee(self, instruction: Instruction) -> "Frame | None":
        """The computation that a fusion, call or async-start runs, None for other instructions."""
        key = _CALLEES.get(instruction.opcode)
        name = instruction.attribute(key) if key else None
        return self._child(instruction, name, instruction.operands) if name else None

    def body(self, loop: Instruction) -> "Frame":
        """One round of a while loop."""
        return self._loop(loop, "body")

    def condition(self, loop: Instruction) -> "Frame":
        """The test that a while loop makes before each round."""
        return self._loop(loop, "condition")

    def branches(self, conditional: Instruction) -> tuple["Frame", ...]:
        """The alternatives of a conditional, of which a device runs one."""
        listed = conditional.braced("branch_computations")
        if listed is None:
            names = [conditional.attribute(f"{side}_computation") for side in ("true", "false")]
        else:
            names = [name.strip(" %") for name in listed.split(",")]
        arguments = conditional.operands[1:]
        return tuple(
            self._child(conditional, name, (argument,))
            for name, argument in zip(names, arguments, strict=True)
            if name
        )

    def _loop(self, loop: Instruction, part: str) -> "Frame":
        names = {key: loop.attribute(key) or "" for key in ("body", part)}
        carry = self.module.computations[names["body"]]
        return self._child(loop, names[part], loop.operands, carry)

    def _child(
        self, caller: Instruction, name: str, arguments: tuple[str, ...], carry: Computation | None = None
    ) -> "Frame":
        return Frame(
            module=self.module,
            computation=self.module.computations[name],
            parent=self,
            caller=caller,
            arguments=arguments,
            carry=carry,
        )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The instruction that made a value, its frame, and which tuple elements of it to take (last first)."""

    frame: Frame
    instruction: Instruction
    elements: tuple[int, ...]


def origin(frame: Frame, name: str, elements: tuple[int, ...] = ()) -> Origin:
    """Follow a value back through copies, tuples, parameters and calls to what made it.

    Args:
        frame: where the value is used.
        name: the instruction that holds it there.
        elements: which tuple element of it is meant, the innermost first.

    Returns:
        The origin; it may lie in another frame.
    """
    while True:
        instruction = frame.computation.instructions[name]
        inner = frame.callee(instruction)
        if instruction.opcode in COPIES or instruction.opcode == "convert":
            name = instruction.operands[0]
        elif instruction.opcode == "get-tuple-element":
            name, elements = instruction.operands[0], (*elements, instruction.index)
        elif instruction.opcode == "tuple" and elements:
            name, elements = instruction.operands[elements[-1]], elements[:-1]
        elif inner is not None and instruction.opcode != "async-start":
            frame, name = inner, inner.computation.root.name
        elif instruction.opcode == "parameter" and frame.parent is not None and _kept(frame, elements):
            frame, name = frame.parent, frame.arguments[int(instruction.arguments)]
        else:
            return Origin(frame=frame, instruction=instruction, elements=elements)


def _kept(frame: Frame, elements: tuple[int, ...]) -> bool:
    """Whether a value that enters the frame is the same in every round of its loop, if it is one."""
    if frame.carry is None:
        return True
    if not elements:
        return False
    alone = Frame(module=frame.module, computation=frame.carry)
    made = origin(alone, frame.carry.root.name, elements[-1:])
    return made.instruction.opcode == "parameter" and made.elements == elements[-1:]


def value(frame: Frame, name: str, elements: tuple[int, ...] = ()) -> np.ndarray | None:
    """The integer that each device holds in a scalar.

    Args:
        frame: where the value is used.
        name: the instruction that holds it there.
        elements: which tuple element of it is meant, the innermost first.

    Returns:
        int64 array of shape (num_devices,), or None where the text does not tell.
    """
    made = origin(frame, name, elements)
    if made.elements:
        return None
    num_devices = frame.module.num_devices
    opcode, operands = made.instruction.opcode, made.instruction.operands
    if opcode == "partition-id":
        return np.arange(num_devices)
    if opcode == "constant":
        table = _table(made.instruction, num_devices)
        return np.full(num_devices, table[0]) if table is not None and len(table) == 1 else None
    if opcode == "dynamic-slice":
        return _looked_up(made)
    direction = made.instruction.attribute("direction") or ""
    function = _COMPARISONS.get(direction) if opcode == "compare" else _ARITHMETIC.get(opcode)
    inputs = values(made.frame, operands) if function is not None else None
    return function(*inputs) if function is not None and inputs is not None else None


def values(frame: Frame, names: Sequence[str]) -> list[np.ndarray] | None:
    """The integers of several scalars as in `value`, None unless all are known."""
    found = [value(frame, name) for name in names]
    known = [array for array in found if array is not None]
    return known if len(known) == len(found) else None


def _looked_up(made: Origin) -> np.ndarray | None:
    """One number of a constant table, at an index that may differ between devices."""
    of_table, *indices = made.instruction.operands
    source = origin(made.frame, of_table).instruction
    if source.opcode != "constant" or made.instruction.arrays[0].num_elements != 1 or len(indices) != 1:
        return None
    table, index = _table(source, made.frame.module.num_devices), value(made.frame, indices[0])
    if table is None or index is None:
        return None
    return table[np.clip(index, 0, len(table) - 1)]


def _table(constant: Instruction, num_devices: int) -> np.ndarray | None:
    """The integers of a constant.

    XLA prints `{...}` for more than ten. Its tables of one entry per device give the device's position
    among the shards, so the devices' own numbers, which differ just as much, stand in for it.
    """
    sizes = constant.arrays[0].sizes
    if constant.arguments == "{...}" and sizes == (num_devices,):
        return np.arange(num_devices)
    if not re.fullmatch(r"[{}\d,\s\-]+", constant.arguments):
        return None
    return np.array([int(number) for number in re.findall(r"-?\d+", constant.arguments)])
