"""Sections of files for some of the islands: their numbers, and the fields of a strategy that may differ.

Values only: no jax, no MPI. Read by `cluster.py`, by strategy files and by the options of a launch.
"""

import re

from shardtrain.system.host import parse_ranges

OF_ISLANDS = ("layout", "accumulate", "remat", "compute_dtype")
"""Fields of a strategy in which islands may differ."""


def island_numbers(name: str) -> set[int] | None:
    """Return the islands that numbers name; None if this text is something else.

    >>> island_numbers("0,2-4"), island_numbers("*V100*")
    ({0, 2, 3, 4}, None)
    """
    name = name.replace(" ", "")
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", name):
        return None
    return set(parse_ranges(name))


def range_text(first: int, count: int) -> str:
    """Return consecutive islands as a section names them.

    >>> range_text(2, 3), range_text(5, 1)
    ('2-4', '5')
    """
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
