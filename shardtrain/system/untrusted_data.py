"""Read untrusted data within bounds: JSON of records, TOML, numbers, and lines of a stream. No jax.

Next: `untrusted_files.py`, which opens files and reads strict JSON; `array_file.py`.
"""

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shardtrain.system.json_size import check_values
from shardtrain.system.plain_text import MARK, decode_text
from shardtrain.system.untrusted_files import MOST_BYTES, MOST_DEPTH, check_depth, read_text

MOST_COUNT_DIGITS = 9
"""Largest number of digits of a number of ranks, nodes or devices."""

MOST_NAME = 200
MOST_INTEGER = 2**63
"""TOML's integers have 64 bits; larger ones become no float or index."""


def parse_record(text: str | bytes) -> Any:
    """Parse JSON of bounded depth like Python, faster than `parse_json`, for data of millions of lines.

    A byte order mark at its start is ignored.

    Raises:
      ValueError: it is no JSON, not UTF-8, has a number of thousands of digits, is nested too deeply, or too
        large (see `check_values`).

    >>> parse_record(b'{"a": [1, NaN]}')
    {'a': [1, nan]}
    """
    text = decode_text(text) if isinstance(text, bytes) else text.lstrip(MARK)
    check_values(text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels") from None
    # counting is fast, and values with so many brackets are rare
    if text.count("[") + text.count("{") > MOST_DEPTH:
        check_depth(value)
    return value


def read_toml(path: Path, most_bytes: int) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
      OSError: see `open_regular`.
      ValueError: it is too large, no TOML, nested too deeply, or has an integer of more than 64 bits.
    """
    try:
        values = tomllib.loads(read_text(path, most_bytes))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels") from None
    check_depth(values)
    _check_integers(values, "")
    return values


def _check_integers(value: Any, name: str) -> None:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _check_integers(each, f"{name}.{key}"[-MOST_NAME:] if name else str(key)[-MOST_NAME:])
    elif type(value) is int and not -MOST_INTEGER <= value < MOST_INTEGER:
        digits = int(abs(value).bit_length() * math.log10(2)) + 1
        raise ValueError(f"{name} is an integer of about {digits:,} digits; one of TOML has 64 bits")


def parse_count(text: str) -> int | None:
    """Parse a number of one to nine digits; None for other texts.

    >>> parse_count("12"), parse_count("1" + "0" * 30), parse_count("-1")
    (12, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_COUNT_DIGITS else None


def read_lines(file: BinaryIO, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """Yield the lines of a stream, each with its end.

    Raises:
      ValueError: a line is longer than `most_bytes`; a small compressed file can hold a huge one.
    """
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise ValueError(f"a line has more than {most_bytes:,} bytes; split it into several")
        yield line
