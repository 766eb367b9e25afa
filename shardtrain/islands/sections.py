"""Parse and format the numbers of islands in sections of cluster files, strategy files and launch options.

Values only: no jax, no MPI.
"""

import re

from shardtrain.system.host import parse_ranges

OF_ISLANDS = ("layout", "accumulate", "remat", "compute_dtype")
"""Fields of a strategy in which islands may differ."""


def island_numbers(name: str) -> set[int] | None:
    """Parse numbers and ranges of islands; None if the text has another form.

    >>> island_numbers("0,2-4"), island_numbers("*V100*")
    ({0, 2, 3, 4}, None)
    """
    name = name.replace(" ", "")
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", name):
        return None
    return set(parse_ranges(name))


def range_text(first: int, count: int) -> str:
    """Format a range of consecutive islands.

    >>> range_text(2, 3), range_text(5, 1)
    ('2-4', '5')
    """
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
