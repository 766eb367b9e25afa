"""Checks of the numbers that advice is asked for; all problems of a question are reported at once."""

import math
from collections.abc import Mapping

from shardtrain.errors.messages import problems_error


def check_positive(asked: str, values: Mapping[str, float], zero: Mapping[str, float] = {}) -> None:
    """Refuse numbers that are not finite, or not above zero.

    Args:
      asked: what was asked for, for the message.
      values: name -> a number that must be above zero.
      zero: name -> a number that may be zero too.

    Raises:
      ValueError: lists every number out of range.

    >>> check_positive("an interval", {"save_seconds": -1.0})
    Traceback (most recent call last):
    ...
    ValueError: an interval was asked for:
      - save_seconds is -1; use a finite number above 0
    """
    problems = [
        f"{name} is {value:g}; use a finite number above 0"
        for name, value in values.items()
        if not (value > 0 and math.isfinite(value))
    ]
    problems += [
        f"{name} is {value:g}; use a finite number of at least 0"
        for name, value in zero.items()
        if not (value >= 0 and math.isfinite(value))
    ]
    if problems:
        raise problems_error(f"{asked} was asked for", problems)


def check_fraction(asked: str, name: str, value: float) -> None:
    """Refuse what is no fraction between 0 and 1.

    Raises:
      ValueError: it is out of range.
    """
    if not 0 < value < 1:
        raise ValueError(f"{asked} was asked for: {name} is {value:g}; use a fraction above 0 and below 1")
