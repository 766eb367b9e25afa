"""Format excerpts of large values and long lists for messages."""

import reprlib
from collections.abc import Sequence


def short(value: object, most: int = 60) -> str:
    """Format a value as text of bounded length.

    Args:
        value: any value.
        most: largest number of characters.

    >>> short("a" * 100, 10), short({"b": [[0] * 99]}, 40)
    ("'aaaaaa...", "{'b': [[0, 0, 0, 0, 0, 0, ...]]}")
    """
    writer = reprlib.Repr()
    writer.maxlevel, writer.maxstring, writer.maxother = 4, 2 * most, 2 * most
    text = writer.repr(value[:most] if isinstance(value, str) else value)
    return text if len(text) <= most else text[: most - 3] + "..."


def some(values: Sequence[object], most: int = 8) -> str:
    """List the first few of many values, and the number of the others.

    Args:
        values: the values, in order.
        most: largest number of values to show.

    >>> some(range(5), 3)
    '0, 1, 2 and 2 more'
    """
    text = ", ".join(map(str, values[:most]))
    return text if len(values) <= most else f"{text} and {len(values) - most} more"
