"""Parse the text of a compiled XLA program into computations and instructions.

Syntax only: values and loops are in `dataflow.py`, collectives in `collectives.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_MODULE = re.compile(r"^HloModule .*$", re.MULTILINE)
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d\w*)?)\[([\d,<=\s]*)\]")
_BRACKETS = re.compile(r"[()\[\]{}]")


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array of the result of an instruction, as HLO writes it: dtype `f32`, sizes (8, 64)."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, rounded up for elements below one byte."""
        bits = re.search(r"\d+", self.dtype)
        bits_per_element = 8 if self.dtype == "pred" else int(bits.group()) if bits else 0
        return math.ceil(self.num_elements * bits_per_element / 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: `%name = type opcode(arguments), attributes`."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that are its operands."""
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments))

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result; one unless it is a tuple."""
        return tuple(
            Array(dtype=dtype, sizes=tuple(int(size) for size in re.findall(r"\d+", sizes)))
            for dtype, sizes in _ARRAY.findall(self.type)
        )

    def attribute(self, key: str) -> str | None:
        """Return the attribute `key` if it is a name or a number, None if it is absent."""
        found = re.search(rf"(?:^|[ ,]){key}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    def find_braced(self, key: str) -> str | None:
        """Return the text between the braces of attribute `key={...}`, None if it is absent."""
        start = self.attributes.find(f"{key}={{")
        if start < 0:
            return None
        start += len(key) + 1
        return self.attributes[start + 1 : _closing(self.attributes, start)]

    @property
    def index(self) -> int:
        """The tuple index of a get-tuple-element."""
        return int(self.attribute("index") or 0)

    @property
    def source(self) -> str:
        """The traced operation it came from, as jax names it; empty if XLA kept none."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A named list of instructions, in the order of the text."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next(i for i in self.instructions.values() if i.is_root)

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by number."""
        return {int(i.arguments): i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Name -> the instructions that have it as an operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(instructions) for name, instructions in found.items()}


@dataclass(frozen=True, kw_only=True)
class Module:
    """A program: its computations, the entry computation, and the number of devices."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_devices: int


def parse(hlo_text: str) -> Module:
    """Parse the text of a compiled program.

    Args:
        hlo_text: what `jax.jit(f).lower(...).compile().as_text()` returns.

    Returns:
        The module. `num_devices` is 1 where the text names neither partitions nor replicas.

    Raises:
        ValueError: the text has no entry computation, so it is not HLO.
    """
    computations: dict[str, Computation] = {}
    entry = None
    instructions: dict[str, Instruction] | None = None
    for line in hlo_text.splitlines():
        header = _HEADER.match(line)
        if header:
            instructions = {}
            name = header.group(2)
            computations[name] = Computation(name=name, instructions=instructions)
            entry = computations[name] if header.group(1) else entry
        elif line.startswith("}"):
            instructions = None
        elif instructions is not None:
            instruction = _parse_instruction(line)
            if instruction:
                instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError(
            f"no entry computation in the program text, which starts with {hlo_text.lstrip()[:40]!r}. Pass"
            " the text of a compiled program: jax.jit(f).lower(...).compile().as_text()."
        )
    return Module(computations=computations, entry=entry, num_devices=_num_devices(hlo_text))


def _parse_instruction(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if start is None:
        return None
    root, name, type_text, opcode = start.groups()
    end = _closing(line, start.end() - 1)
    return Instruction(
        name=name,
        type=type_text,
        opcode=opcode,
        arguments=line[start.end() : end],
        attributes=line[end + 1 :],
        is_root=root is not None,
    )


def _closing(text: str, start: int) -> int:
    """Return the position of the bracket that closes the one at `start`."""
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        depth += 1 if bracket.group() in "([{" else -1
        if depth == 0:
            return bracket.start()
    return len(text)


def _num_devices(hlo_text: str) -> int:
    header = _MODULE.search(hlo_text)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header.group()) if header else []
    return math.prod(int(count) for count in counts)
