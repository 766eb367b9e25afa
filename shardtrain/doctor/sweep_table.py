"""The table of `shardtrain doctor --sweep`: one row for each operation and size, and notes."""

from collections.abc import Sequence

from shardtrain.doctor.check import Facts
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text

HEADER = ("operation", "array", "MPI us", "MPI GB/s", "bridge us", "bridge GB/s", "ratio", "rounds")

NOTES = (
    "MPI: mpi4py on reused host memory. bridge: what a run calls, from a device's array to a device's array",
    "array: what a rank ends up with. us: median over rounds, from a barrier to the end on the last rank;"
    " GB/s: array / us",
    "ratio: bridge / MPI, the median over rounds that contain both",
    "reduce: the bridge has none, because every island needs the sum; it is a part of the all-reduce with"
    " --reduce root and hierarchical",
    "exchange: around the ring in a compiled program, as combiners do; send/receive: around the ring through"
    " the mailbox of pipeline stages, to host memory",
)


def sweep_text(measurements: Sequence[Facts], num_ranks: int, num_hosts: int) -> str:
    """Format the measurements of a sweep as a table with notes.

    Args:
      measurements: from `sweep.measure`.
      num_ranks: number of ranks that took part.
      num_hosts: number of hosts on which they ran.
    """
    where = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
    rows = [HEADER, *(_cells(one) for one in measurements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    header, *cells = [
        (row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
        for row in rows
    ]
    table = table_text(header, cells, title=f"{num_ranks} ranks on {where}")
    return table + "".join(f"{note}\n" for note in NOTES)


def _cells(one: Facts) -> tuple[str, ...]:
    return (
        one["operation"],
        bytes_text(one["bytes"]),
        *_figures(one["bytes"], one["mpi_seconds"]),
        *_figures(one["bytes"], one["bridge_seconds"]),
        "-" if one["ratio"] is None else f"{one['ratio']:.2f}",
        str(one["rounds"]),
    )


def _figures(num_bytes: int, seconds: float | None) -> tuple[str, str]:
    if seconds is None:
        return "-", "-"
    return f"{seconds * 1e6:.1f}", f"{num_bytes / seconds / 1e9:.3g}"
