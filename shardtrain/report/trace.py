"""Summarise a trace of jax's profiler: the share of time by kind of operation, and the longest operations.

It reads the file `*.trace.json.gz` of a profile. `trainer/session.py` records one.
"""

import gzip
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain.report.tables import table_text
from shardtrain.report.trace_programs import LOOPS, MOST_TRACE_BYTES, Source
from shardtrain.system.untrusted_data import parse_record
from shardtrain.system.untrusted_files import open_regular

KINDS = ("matmul", "attention", "other", "collectives")
"""Kinds of operations; if several run at once, the time counts for the first of them."""

_NAMES = {
    "collectives": r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|nccl|send|recv",
    "attention": r"fmha|flash|attention|sdpa|dot_do_o|convert_dq",
    "matmul": r"\bdot\b|gemm|matmul|cutlass|cublas|nvjet|conv(?!ert)|wgmma",
}
"""Kind -> pattern of the names of an operation, of its kernel, or of its source."""


NUM_TOP = 10
"""Number of the longest operations to show."""

UNTIMED = "outside the steps"
"""The name of events around work outside the steps, such as an evaluation."""

NO_SOURCE = Source("", "")


_GRAPH = "command_buffer"
"""Name that operations in a CUDA graph have; their kernels have the operations' names with _ for . and -."""


class Operation(NamedTuple):
    """One execution of an operation.

    Attributes:
      name: of the compiled program, such as "fusion.3".
      kind: one of `KINDS`.
      start, end: microseconds.
    """

    name: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """The time of one device by kind of operation.

    Args:
      seconds: seconds from the first operation's start to the last one's end.
      shares: kind or "idle" -> share of these seconds; for collectives the time in which nothing else ran.
      hidden: share of the seconds in which collectives ran at the same time as other operations.
      top: (name, kind, seconds, executions), the longest operations first.
    """

    seconds: float
    shares: Mapping[str, float]
    hidden: float
    top: tuple[tuple[str, str, float, int], ...]


def find_kind(name: str, source: Source = NO_SOURCE) -> str:
    """Return the kind of an operation.

    Args:
      name: names of the operation and its kernel.
      source: the fused operations, and their path in the model.

    >>> find_kind("all-reduce-start.2"), find_kind("nvjet_hsh_128x256")
    ('collectives', 'matmul')
    >>> find_kind("fusion.3", Source("fusion dot", "jit(step)/attention/mul"))
    'attention'
    >>> find_kind("loop_convert_fusion", Source("fusion", "a/dot_general"))
    'other'
    """
    made_of = f"{name} {source.opcodes}"
    texts = {"collectives": made_of, "attention": f"{made_of} {source.path}", "matmul": made_of}
    return next((kind for kind, text in texts.items() if re.search(_NAMES[kind], text)), "other")


def read_trace(path: Path) -> list[Mapping[str, Any]]:
    """Return the events of a trace file.

    Raises:
      ValueError: the file is no trace.
      OSError: it cannot be read.
    """
    try:
        with open_regular(path) as compressed, gzip.GzipFile(fileobj=compressed) as file:
            text = file.read(MOST_TRACE_BYTES + 1)
        if len(text) > MOST_TRACE_BYTES:
            raise ValueError(f"it has more than {MOST_TRACE_BYTES:,} bytes")
        return parse_record(text)["traceEvents"]
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no trace of jax's profiler ({error}); record it again") from error


def find_operations(
    events: Sequence[Mapping[str, Any]], sources: Mapping[tuple[str, str], Source] | None = None
) -> dict[str, list[Operation]]:
    """Return the operations of each device.

    They are in the streams of a GPU, in the line of operations of a TPU, and in all threads of a CPU that run
    compiled programs. Work during an event `UNTIMED` is left out, and later operations move forward.

    Args:
      events: the events of the trace.
      sources: (program, name of an operation) -> its source, see `trace_programs.read_sources`.
    """
    labels = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")
    }
    found: dict[str, list[Operation]] = defaultdict(list)
    of_kernels = {(module, _kernel(name)): source for (module, name), source in (sources or {}).items()}
    for event in events:
        if event.get("ph") != "X":
            continue
        process = labels.get(("process_name", event["pid"], None)) or labels.get(
            ("process_name", event["pid"], event.get("tid")), ""
        )
        thread = labels.get(("thread_name", event["pid"], event.get("tid")), "")
        arguments = event.get("args", {})
        on_device = process.startswith("/device:") and (thread.startswith("Stream") or thread == "XLA Ops")
        if not on_device and not (process == "/host:CPU" and "hlo_op" in arguments):
            continue
        name, module = arguments.get("hlo_op", event["name"]), arguments.get("hlo_module", "")
        if name.startswith(_GRAPH):
            name = event["name"]
        # operations of several programs may have one name
        of_program = [(module, _kernel(name)), ("", _kernel(name))]
        unknown = Source("", f"{arguments.get('name')} {arguments.get('tf_op')}")
        source = next((of_kernels[key] for key in of_program if key in of_kernels), unknown)
        if source.opcodes.split(" ")[0] in LOOPS or name.split(".")[0] in LOOPS:
            continue
        start = float(event["ts"])
        end = start + float(event.get("dur", 0))
        found[process].append(Operation(name, find_kind(f"{name} {event['name']}", source), start, end))
    # streams of a GPU are copied into lines of operations: each kernel counts once
    left_out = _windows(events)
    return {
        device: sorted({kept for op in each if (kept := _move(op, left_out))}, key=lambda op: op.start)
        for device, each in found.items()
    }


def _kernel(name: str) -> str:
    """Return the name of the kernel of an operation.

    >>> _kernel("input-reduce_fusion.3")
    'input_reduce_fusion_3'
    """
    return re.sub(r"[.-]", "_", name)


def _windows(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return start and end of each window outside the steps, in microseconds, in order."""
    untimed = [event for event in events if event.get("ph") == "X" and event["name"] == UNTIMED]
    return sorted((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))) for event in untimed)


def _move(op: Operation, left_out: Sequence[tuple[float, float]]) -> Operation | None:
    """Move an operation forward by the windows before it; None if it is inside one of them.

    >>> op = Operation("dot", "matmul", 50.0, 60.0)
    >>> _move(op, [(10.0, 30.0)]), _move(op, [(45.0, 70.0)])
    (Operation(name='dot', kind='matmul', start=30.0, end=40.0), None)
    """
    if any(start <= op.start and op.end <= end for start, end in left_out):
        return None
    before = sum(min(end, op.start) - start for start, end in left_out if start < op.start)
    return op._replace(start=op.start - before, end=op.end - before)


def summarise(devices: Mapping[str, Sequence[Operation]]) -> TraceSummary:
    """Summarise the time of the first device.

    Raises:
      ValueError: the trace has no operation.
    """
    # a GPU's host runs small programs too
    names = sorted(devices, key=lambda name: (not name.startswith("/device:"), name))
    if not names:
        raise ValueError("the trace has no operations of a device; profile steps in which programs run")
    found = devices[names[0]]
    start, end = min(op.start for op in found), max(op.end for op in found)
    # an instant counts for the first kind that runs
    changes = sorted(change for op in found for change in ((op.start, 1, op.kind), (op.end, -1, op.kind)))
    running: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    hidden, before = 0.0, start
    for time, step, kind in changes:
        active = next((each for each in KINDS if running[each]), "idle")
        seconds[active] += time - before
        if running["collectives"] and active != "collectives":
            hidden += time - before
        running[kind] += step
        before = time
    whole = max(end - start, 1e-9)
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for op in found:
        sums[op.name, op.kind] += op.end - op.start
    counts = Counter((op.name, op.kind) for op in found)
    longest = sorted(sums, key=lambda key: -sums[key])[:NUM_TOP]
    top = [(*key, 1e-6 * sums[key], counts[key]) for key in longest]
    return TraceSummary(
        seconds=1e-6 * whole,
        shares={kind: seconds[kind] / whole for kind in (*KINDS, "idle")},
        hidden=hidden / whole,
        top=tuple(top),
    )


def summary_text(summary: TraceSummary, num_steps: int) -> str:
    """Format a summary: shares of time, then the longest operations by step."""
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in summary.shares.items())
    hidden = f"; collectives overlapped {summary.hidden:.0%}" if summary.hidden else ""
    rows = [
        (name, kind, f"{1e3 * seconds / num_steps:.3f}", f"{count / num_steps:g}")
        for name, kind, seconds, count in summary.top
    ]
    return (
        f"profile of {num_steps} step{'s' * (num_steps > 1)},"
        f" {1e3 * summary.seconds / num_steps:.3g} ms each: {shares}{hidden}\n"
        + table_text(("operation", "kind", "ms a step", "times a step"), rows)
    )
