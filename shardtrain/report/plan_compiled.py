"""Compare the compiled step of a plan with its prediction, for `shardtrain plan --compile`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardtrain import axes
from shardtrain.plan.compile import Figures
from shardtrain.plan.hlo.collectives import ALL_GATHER, sum_by_axis
from shardtrain.plan.prediction import Prediction
from shardtrain.report.quantities import bytes_text, count_text
from shardtrain.report.tables import table_text
from shardtrain.sharding.specs import Row, spec_axes

SMALL = 0.01
"""Fraction of all parameters below which a replicated array is not reported."""


def format_compiled(
    found: Figures,
    predicted: Prediction,
    *,
    title: str,
    sent_bytes: Mapping[tuple[str, ...], float],
) -> str:
    """Format memory, flops and bytes by mesh axes of a compiled step and of its prediction.

    Args:
      found: the figures of the compiled step.
      predicted: the prediction.
      title: the title of the table.
      sent_bytes: mesh axes -> bytes that a device sends, as predicted.
    """
    memory = predicted.memory
    state = memory.parameters + memory.optimizer + memory.batch
    rows = [
        ("state and batch", *_compare(state, found.argument_bytes, bytes_text)),
        (
            "other arrays",
            *_compare(memory.total - state, found.device_bytes - found.argument_bytes, bytes_text),
        ),
        ("memory of a device", *_compare(memory.total, found.device_bytes, bytes_text)),
        *(
            [("flops of a device", *_compare(predicted.flops, found.flops, count_text))]
            if found.flops
            else []
        ),
    ]
    of_compiled: dict[tuple[str, ...], float] = {}
    for (_, over), (_, sent) in sum_by_axis(found.collectives).items():
        of_compiled[over] = of_compiled.get(over, 0.0) + sent
    all_axes = {*of_compiled, *sent_bytes}
    for over in sorted(all_axes, key=lambda over: [axes.AXES.index(axis) for axis in over]):
        sent = sent_bytes.get(over, 0.0), of_compiled.get(over, 0.0)
        rows.append((f"sent over {'+'.join(over)}", *_compare(*sent, bytes_text)))
    header = ("of a step", "predicted", "compiled", "predicted / compiled")
    return table_text(header, rows, title=title)


def _compare(predicted: float, compiled: float, text: Callable[[float], str]) -> tuple[str, str, str]:
    ratio = f"{predicted / compiled:.3f}" if compiled else "-"
    return text(predicted), text(compiled), ratio


def flag_parameters(rows: Sequence[Row], found: Figures, zero: int, num_devices: int) -> Iterator[str]:
    """Return a line for each parameter that is replicated on every device, or gathered over tensor.

    Args:
      rows: the placement of the parameters.
      found: the figures of the compiled step.
      zero: the ZeRO stage; below 3 parameters are replicated over fsdp by the layout.
      num_devices: number of devices in the mesh.
    """
    everything = sum(row.num_bytes for row in rows)
    # pure data parallelism replicates every parameter by design
    sharded = any(row.copies < num_devices for row in rows)
    for row in rows:
        if sharded and zero == 3 and row.copies == num_devices and row.num_bytes > SMALL * everything:
            size = bytes_text(row.num_bytes)
            yield f"{row.path} ({size}) is whole on every device; give a rule for one of its dims"
    gathered = [each for each in found.collectives if each.kind == ALL_GATHER and axes.TENSOR in each.axes]
    for row in rows:
        if axes.TENSOR not in spec_axes(row.spec):
            continue
        blocks = row.shape[0] if (row.dims or ())[:1] == (axes.LAYERS,) else 1
        elements = math.prod(row.shape) // blocks
        alike = [each for each in gathered if _elements(each.payload_bytes, each.dtype) == elements]
        if alike:
            times = sum(each.count for each in alike)
            yield (
                f"{row.path} is split over tensor, and {times} all-gathers of arrays of its size run over"
                " that axis; see whether a constraint of the model contradicts its rules"
            )


def _elements(num_bytes: int, dtype: str) -> int:
    """Return the number of elements of an array.

    >>> _elements(64, "bf16"), _elements(64, "f32")
    (32, 16)
    """
    bits = int("".join(filter(str.isdigit, dtype)) or 8)
    return num_bytes * 8 // bits
