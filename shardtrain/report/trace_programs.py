"""Read from a profile which operations of the model each operation of a compiled program comes from.

The file `*.xplane.pb` has the programs as protocol buffers. The few necessary fields are read from the wire
format, without a library. Next: `trace.py`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shardtrain.system.untrusted_files import read_bytes

MOST_TRACE_BYTES = 1 << 32

# numbers of fields in xplane.proto (tsl/profiler/protobuf) and hlo.proto (xla/service)
_SPACE_PLANES = 1
_PLANE_NAME, _PLANE_EVENTS = 2, 4
_ENTRY_VALUE = 2
_EVENT_STATS = 5
_STAT_BYTES = 6
_HLO_MODULE = 1
_MODULE_COMPUTATIONS = 3
_COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID = 2, 5
_NAME, _OPCODE, _METADATA, _TARGET, _CALLED = 1, 2, 7, 28, 38
_METADATA_OP_NAME = 2
METADATA_PLANE = "/host:metadata"

LOOPS = ("while", "conditional", "call")
"""Opcodes of operations whose parts have their own events in the trace."""


def parse_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a protocol buffer: a whole number, or bytes.

    Raises:
      ValueError: the message ends in the middle of a field.

    >>> list(parse_fields(bytes([8, 150, 1, 18, 2, 104, 105])))
    [(1, 150), (2, b'hi')]
    """
    at = 0
    try:
        while at < len(message):
            key, at = _varint(message, at)
            number, kind = key >> 3, key & 7
            if kind == 0:
                value, at = _varint(message, at)
                yield number, value
                continue
            if kind == 2:
                size, at = _varint(message, at)
            else:
                size = {1: 8, 5: 4}[kind]
            if at + size > len(message):
                raise IndexError
            yield number, message[at : at + size]
            at += size
    except (IndexError, KeyError) as error:
        raise ValueError(f"a message of {len(message)} bytes is damaged at byte {at}") from error


class Source(NamedTuple):
    """The source of an operation.

    Attributes:
      opcodes: the opcodes of the operation and of fused ones, with the target of a custom call.
      path: the path in the model.
    """

    opcodes: str
    path: str


def read_sources(path: Path) -> dict[tuple[str, str], Source]:
    """Return (program, name of an operation) -> source; "" stands for any program.

    Args:
      path: a file `*.xplane.pb` of a profile.

    Raises:
      ValueError: the file is damaged.
      OSError: it cannot be read.
    """
    found: dict[tuple[str, str], Source] = {}
    for plane in _all(read_bytes(path, MOST_TRACE_BYTES), _SPACE_PLANES):
        if _text(plane, _PLANE_NAME) != METADATA_PLANE:
            continue
        for entry in _all(plane, _PLANE_EVENTS):
            for event in _all(entry, _ENTRY_VALUE):
                for stat in _all(event, _EVENT_STATS):
                    for program in _all(stat, _STAT_BYTES):
                        for module in _all(program, _HLO_MODULE):
                            of_module = _read_module(module)
                            for program_name in ("", _text(module, _NAME)):
                                found |= {(program_name, name): each for name, each in of_module.items()}
    return found


def _read_module(module: bytes) -> dict[str, Source]:
    """Return the sources of a program's operations."""
    opcodes: dict[int, set[str]] = {}
    instructions: list[bytes] = []
    for computation in _all(module, _MODULE_COMPUTATIONS):
        own = list(_all(computation, _COMPUTATION_INSTRUCTIONS))
        for number in _numbers(computation, _COMPUTATION_ID):
            opcodes[number] = {_text(each, _OPCODE) for each in own}
        instructions += own
    return {_text(each, _NAME): _source(each, opcodes) for each in instructions}


def _source(instruction: bytes, opcodes: Mapping[int, set[str]]) -> Source:
    opcode = _text(instruction, _OPCODE)
    called = [] if opcode in LOOPS else _numbers(instruction, _CALLED)
    fused = sorted(set().union(*(opcodes.get(number, set()) for number in called)))
    paths = [_text(metadata, _METADATA_OP_NAME) for metadata in _all(instruction, _METADATA)]
    return Source(" ".join([opcode, _text(instruction, _TARGET), *fused]), " ".join(paths))


def _all(message: bytes, number: int) -> Iterator[bytes]:
    return (value for found, value in parse_fields(message) if found == number and isinstance(value, bytes))


def _text(message: bytes, number: int) -> str:
    return next((value.decode(errors="replace") for value in _all(message, number)), "")


def _numbers(message: bytes, number: int) -> list[int]:
    """Return a repeated whole number, packed or not."""
    found: list[int] = []
    for each, value in parse_fields(message):
        if each != number:
            continue
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
