"""Read from a profile which operations of the model each operation of a compiled program comes from.

The file `*.xplane.pb` has the programs as protocol buffers. Next: `trace.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain.system.protobuf import parse_message
from shardtrain.system.untrusted_files import read_bytes

MOST_TRACE_BYTES = 1 << 32

PROFILE = """
name: "profile.proto" package: "shardtrain" syntax: "proto3"
message_type { name: "Space"
  field { name: "planes" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Plane" } }
message_type { name: "Plane" field { name: "name" number: 2 type: TYPE_BYTES }
  field { name: "events" number: 4 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" } }
message_type { name: "Entry" field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Event" } }
message_type { name: "Event"
  field { name: "stats" number: 5 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Stat" } }
message_type { name: "Stat" field { name: "content" number: 6 type: TYPE_BYTES } }
message_type { name: "Program" field { name: "module" number: 1 type: TYPE_MESSAGE type_name: "Module" } }
message_type { name: "Module" field { name: "name" number: 1 type: TYPE_BYTES }
  field { name: "computations" number: 3 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Computation" } }
message_type { name: "Computation" field { name: "id" number: 5 type: TYPE_INT64 }
  field { name: "instructions" number: 2 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Instruction" } }
message_type { name: "Instruction"
  field { name: "name" number: 1 type: TYPE_BYTES }
  field { name: "opcode" number: 2 type: TYPE_BYTES }
  field { name: "metadata" number: 7 type: TYPE_MESSAGE type_name: "Metadata" }
  field { name: "target" number: 28 type: TYPE_BYTES }
  field { name: "called" number: 38 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Metadata" field { name: "path" number: 2 type: TYPE_BYTES } }
"""
"""Fields of xplane.proto (tsl/profiler/protobuf) and hlo.proto (xla/service); texts may be no UTF-8."""

METADATA_PLANE = b"/host:metadata"

LOOPS = ("while", "conditional", "call")
"""Opcodes of operations whose parts have their own events in the trace."""


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
    for plane in parse_message(PROFILE, "Space", read_bytes(path, MOST_TRACE_BYTES)).planes:
        if plane.name != METADATA_PLANE:
            continue
        contents = [stat.content for entry in plane.events for stat in entry.value.stats]
        for content in filter(None, contents):
            module = parse_message(PROFILE, "Program", content).module
            of_module = _read_module(module)
            for program in ("", _text(module.name)):
                found |= {(program, name): each for name, each in of_module.items()}
    return found


def _read_module(module: Any) -> dict[str, Source]:
    """Return the sources of a program's operations."""
    opcodes = {each.id: {_text(one.opcode) for one in each.instructions} for each in module.computations}
    return {
        _text(one.name): _source(one, opcodes) for each in module.computations for one in each.instructions
    }


def _source(instruction: Any, opcodes: Mapping[int, set[str]]) -> Source:
    opcode = _text(instruction.opcode)
    called = [] if opcode in LOOPS else instruction.called
    fused = sorted(set().union(*(opcodes.get(number, set()) for number in called)))
    return Source(" ".join([opcode, _text(instruction.target), *fused]), _text(instruction.metadata.path))


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
