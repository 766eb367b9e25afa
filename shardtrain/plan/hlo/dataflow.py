"""Find origins of values, integers of scalars and trip counts of loops in a compiled program.

Values are followed through copies, fusions, calls and loops that pass them on unchanged. XLA prints trip
counts for CPU and GPU; for TPU they follow from the start, step and limit of the loop counter.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardtrain.plan.hlo.text import Computation, Instruction, Module

COPIES = frozenset({"bitcast", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape"})
"""Operations whose value is the value of their first operand."""

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
    """A computation as called by one instruction, like a frame of a call stack.

    `arguments` name the values of its parameters in the parent frame. In a loop `carry` is the body of the
    loop: only values that the body passes on unchanged still have their value from before the loop.
    """

    module: Module
    computation: Computation
    parent: "Frame | None" = None
    caller: Instruction | None = None
    arguments: tuple[str, ...] = ()
    carry: Computation | None = None

    def callee(self, instruction: Instruction) -> "Frame | None":
        """Return the frame of the computation that a fusion, call or async-start runs; else None."""
        key = _CALLEES.get(instruction.opcode)
        name = instruction.attribute(key) if key else None
        return self._child(instruction, name, instruction.operands) if name else None

    def body(self, loop: Instruction) -> "Frame":
        """Return the frame of one iteration of a while loop."""
        return self._loop(loop, "body")

    def condition(self, loop: Instruction) -> "Frame":
        """Return the frame of the condition that a while loop evaluates before each iteration."""
        return self._loop(loop, "condition")

    def branches(self, conditional: Instruction) -> tuple["Frame", ...]:
        """Return the frames of the branches of a conditional."""
        listed = conditional.find_braced("branch_computations")
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
    """The instruction that computes a value, its frame, and the tuple elements to take of it (last first)."""

    frame: Frame
    instruction: Instruction
    elements: tuple[int, ...]


def find_origin(frame: Frame, name: str, elements: tuple[int, ...] = ()) -> Origin:
    """Follow a value back through copies, tuples, parameters and calls to the instruction that computes it.

    Args:
        frame: where the value is used.
        name: the instruction whose value it is there.
        elements: indices of the tuple element, the innermost first.

    Returns:
        The origin, which may be in another frame.
    """
    # each step moves to an operand, into a called computation, or out to the caller
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
        elif (
            instruction.opcode == "parameter"
            and frame.parent is not None
            and _is_loop_invariant(frame, elements)
        ):
            frame, name = frame.parent, frame.arguments[int(instruction.arguments)]
        else:
            return Origin(frame=frame, instruction=instruction, elements=elements)


def _is_loop_invariant(frame: Frame, elements: tuple[int, ...]) -> bool:
    """Return whether a parameter of a loop's frame has the same value in every iteration."""
    if frame.carry is None:
        return True
    if not elements:
        return False
    # the value is invariant if the body returns the element that it was given, in the same place
    alone = Frame(module=frame.module, computation=frame.carry)
    made = find_origin(alone, frame.carry.root.name, elements[-1:])
    return made.instruction.opcode == "parameter" and made.elements == elements[-1:]


def find_value(frame: Frame, name: str, elements: tuple[int, ...] = ()) -> np.ndarray | None:
    """Return the integer that each device has in a scalar.

    Args:
        frame: where the value is used.
        name: the instruction whose value it is there.
        elements: indices of the tuple element, the innermost first.

    Returns:
        int64 array of shape (num_devices,), or None if the text does not determine it.
    """
    # first find where the value is computed, then compute it for all devices at once
    made = find_origin(frame, name, elements)
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
        return _look_up(made)
    direction = made.instruction.attribute("direction") or ""
    function = _COMPARISONS.get(direction) if opcode == "compare" else _ARITHMETIC.get(opcode)
    inputs = find_values(made.frame, operands) if function is not None else None
    return function(*inputs) if function is not None and inputs is not None else None


def find_values(frame: Frame, names: Sequence[str]) -> list[np.ndarray] | None:
    """Return the integers of several scalars as `value` does, None unless all are known."""
    found = [find_value(frame, name) for name in names]
    known = [array for array in found if array is not None]
    return known if len(known) == len(found) else None


def _look_up(made: Origin) -> np.ndarray | None:
    """Return one number of a constant table per device, at an index that may differ between devices."""
    of_table, *indices = made.instruction.operands
    source = find_origin(made.frame, of_table).instruction
    if source.opcode != "constant" or made.instruction.arrays[0].num_elements != 1 or len(indices) != 1:
        return None
    table, index = _table(source, made.frame.module.num_devices), find_value(made.frame, indices[0])
    if table is None or index is None:
        return None
    return table[np.clip(index, 0, len(table) - 1)]


def _table(constant: Instruction, num_devices: int) -> np.ndarray | None:
    """Return the integers of a constant, None if they are not printed.

    XLA prints `{...}` for more than ten. Its tables of one entry per device have the device's position among
    the shards; the device numbers, which are just as distinct, are used instead.
    """
    sizes = constant.arrays[0].sizes
    # a table that is not printed is useful only where it has one entry for each device
    if constant.arguments == "{...}" and sizes == (num_devices,):
        return np.arange(num_devices)
    if not re.fullmatch(r"[{}\d,\s\-]+", constant.arguments):
        return None
    return np.array([int(number) for number in re.findall(r"-?\d+", constant.arguments)])


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def find_trip_count(frame: Frame, loop: Instruction) -> int | None:
    """Return the number of iterations of a while loop.

    Args:
        frame: the frame of the loop.
        loop: the `while` instruction.

    Returns:
        The count that XLA prints, or that follows from the loop counter; None if neither is known.
    """
    printed = re.search(r"known_trip_count\D*(\d+)", loop.attributes)
    if printed:
        return int(printed.group(1))
    # the condition must compare a carried counter with a limit
    condition, body = frame.condition(loop), frame.body(loop)
    test = find_origin(condition, condition.computation.root.name)
    direction = test.instruction.attribute("direction")
    if test.instruction.opcode != "compare" or direction not in _MIRRORED:
        return None
    left, right = test.instruction.operands
    counter = _counter(test.frame, left, condition)
    # the counter may be on either side of the comparison
    if counter is None:
        left, right, direction = right, left, _MIRRORED[direction]
        counter = _counter(test.frame, left, condition)
    if counter is None:
        return None
    # the counter starts before the loop, and the body adds a constant step
    start, limit = (
        _same(find_value(frame, loop.operands[0], (counter,))),
        _same(find_value(test.frame, right)),
    )
    step = _step(body, counter)
    if start is None or limit is None or not step:
        return None
    return _iterations(start, limit, step, direction)


def _counter(frame: Frame, name: str, condition: Frame) -> int | None:
    """Return the index of `name` in the tuple that the loop carries, None if it is not an element of it."""
    made = find_origin(frame, name)
    is_carried = made.instruction.opcode == "parameter" and made.frame.computation is condition.computation
    return made.elements[0] if is_carried and len(made.elements) == 1 else None


def _step(body: Frame, counter: int) -> int | None:
    """Return the number that an iteration adds to the counter."""
    update = find_origin(body, body.computation.root.name, (counter,))
    if update.instruction.opcode != "add":
        return None
    left, right = update.instruction.operands
    if _counter(update.frame, left, body) != counter:
        left, right = right, left
    if _counter(update.frame, left, body) != counter:
        return None
    return _same(find_value(update.frame, right))


def _same(per_device: np.ndarray | None) -> int | None:
    """Return the number that all devices have, None if they differ."""
    if per_device is None or (per_device != per_device[0]).any():
        return None
    return int(per_device[0])


def _iterations(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction in ("LT", "LE") and step > 0:
        return len(range(start, limit + (direction == "LE"), step))
    if direction in ("GT", "GE") and step < 0:
        return len(range(start, limit - (direction == "GE"), step))
    if direction == "NE" and (limit - start) % step == 0 and (limit - start) // step >= 0:
        return (limit - start) // step
    return None
