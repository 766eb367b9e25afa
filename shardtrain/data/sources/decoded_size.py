"""How much memory a column may take once it is decoded: a few bytes can stand for any number of values.

Next: `parquet_columns.py` and `arrow_messages.py`, which find it before pyarrow allocates it.
"""

LEAST_BYTES, BYTES_OF_A_BYTE = 1 << 29, 1 << 4
"""A column of a row group may decode to so many bytes, and so many more for each byte of the file."""

SIZE = 12
"""Bytes of a value and its levels, beside the content of a text."""

HOW = "write smaller row groups, or shorter rows"


def most_decoded(num_bytes: int) -> int:
    """Return the largest size to which a column of a file of so many bytes may decode."""
    return LEAST_BYTES + BYTES_OF_A_BYTE * num_bytes


class TooLarge(ValueError):
    """Something would take more memory than may be read."""


def check_decoded(num_bytes: int, most: int, what: str) -> None:
    """Check a size before memory is taken.

    Raises:
      TooLarge: it is.
    """
    if num_bytes > most:
        raise TooLarge(f"{what} would take {num_bytes:,} bytes; at most {most:,} are read; {HOW}")
