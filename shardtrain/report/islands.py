"""Format what a run prints about its islands when it starts: their ranks, and the buckets that they send."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text

MOST_BUCKETS = 16
"""Largest number of buckets whose sizes are shown."""


def binding_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Format a row per rank.

    Args:
      ranks: the result of `islands.membership.binding`.

    >>> row = {"rank": 0, "island": 0, "process": 0, "host": "a", "pid": 7}
    >>> binding_text([row | {"devices": "2 x cpu", "ids": "", "cores": 4}]).splitlines()[2].split()
    ['0', '0', 'a', '7', '2', 'x', 'cpu', '4']
    """
    several = any(row["process"] for row in ranks)
    lines = [
        (
            str(row["rank"]),
            f"{row['island']}.{row['process']}" if several else str(row["island"]),
            row["host"],
            str(row["pid"]),
            row["devices"] + (f" ({row['ids']})" if row["ids"] else ""),
            str(row["cores"]),
        )
        for row in ranks
    ]
    return table_text(("rank", "island", "host", "pid", "devices", "cores"), lines)


def parts_text(sizes_bytes: Sequence[int], num_parts: int) -> str:
    """Format the bytes of gradients that are sent after each program that computes some of them.

    Args:
      sizes_bytes: bytes after each program.
      num_parts: number of programs in the options.

    >>> parts_text([1 << 20, 3 << 20], 2)
    'gradients: 2 programs, the last layers first; after each is sent: 1.0 MiB, 3.0 MiB'
    >>> parts_text([4 << 20], 2)
    'gradients: 1 program, not 2: all are ready at its end only'
    """
    if len(sizes_bytes) == 1:
        return f"gradients: 1 program, not {num_parts}: all are ready at its end only"
    fewer = "" if len(sizes_bytes) == num_parts else f" (not {num_parts}: few are ready before the end)"
    sent = ", ".join(map(bytes_text, sizes_bytes))
    return f"gradients: {len(sizes_bytes)} programs{fewer}, the last layers first; after each is sent: {sent}"


def buckets_text(sizes_bytes: Sequence[int]) -> str:
    """Format the buckets that an island sends to the others, in the order of sending.

    Args:
      sizes_bytes: bytes of each bucket's arrays, before a codec.

    >>> buckets_text([1 << 20, 25 << 20, 9000])
    'bridge: 3 buckets of 25.0 MiB at most, in the order of sending: 1.0 MiB, 25.0 MiB, 8.8 KiB'
    >>> buckets_text([500])
    'bridge: 1 bucket of 500 B'
    """
    if len(sizes_bytes) < 2:
        return f"bridge: {len(sizes_bytes)} bucket of {bytes_text(sum(sizes_bytes))}"
    shown = [bytes_text(each) for each in sizes_bytes[:MOST_BUCKETS]]
    shown += ["..."] if len(sizes_bytes) > MOST_BUCKETS else []
    return (
        f"bridge: {len(sizes_bytes)} buckets of {bytes_text(max(sizes_bytes))} at most, in the order of"
        f" sending: {', '.join(shown)}"
    )
