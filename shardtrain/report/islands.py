"""The table of ranks that is printed at the start: island, host, process, devices and cores."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardtrain.report.tables import table_text


def binding_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Format a row per rank.

    Args:
      ranks: from `islands.membership.binding`.

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
