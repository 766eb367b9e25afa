"""Check the options of a model's configuration.

Each check returns a list of problems, empty if there are none, so that a configuration reports all of them at
once.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any


def positive(values: Mapping[str, int | float]) -> list[str]:
    """Report each named value that is not above zero, or not finite.

    >>> positive({"embed": 0, "seq": 8})
    ['embed is 0; it must be at least 1. Use embed=1 or more.']
    """
    return [
        f"{name} is {value}; it must be at least 1. Use {name}=1 or more."
        if isinstance(value, int)
        else f"{name} is {value}; it must be above 0 and finite. Use a small number such as {name}=1e-5."
        for name, value in values.items()
        if not 0 < value < math.inf
    ]


def numbers(config: Any) -> list[str]:
    """Report each number of a configuration that is not above 0, and a dropout rate outside [0, 1)."""
    found: list[str] = []
    for name, kind, value in ((f.name, f.type, getattr(config, f.name)) for f in fields(config)):
        if name == "dropout":
            found += dropout_rate(name, value)
        elif value is not None and kind in (int, int | None):
            found += positive({name: value})
        elif value is not None and kind in (float, float | None):
            found += positive({name: float(value)})
    return found


def choice(name: str, value: str, allowed: Sequence[str]) -> list[str]:
    """Report a value that is not allowed, with the nearest allowed value.

    >>> choice("norm", "layer_norm", ("layernorm", "rmsnorm"))
    ["norm is 'layer_norm'; allowed are 'layernorm', 'rmsnorm'. Use norm='layernorm'."]
    """
    if value in allowed:
        return []
    near = (*difflib.get_close_matches(value, allowed, n=1, cutoff=0.0), allowed[0])[0]
    return [f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}. Use {name}={near!r}."]


def multiple(name: str, value: int, of_name: str, of: int) -> list[str]:
    """Report a value that another does not divide, with the nearest multiples.

    >>> multiple("embed", 50, "num_heads", 4)
    ['embed 50 is not a multiple of num_heads 4: 50 % 4 = 2. Use embed=48 or embed=52.']
    """
    if value % of == 0:
        return []
    below, above = value - value % of, value + of - value % of
    uses = " or ".join(f"{name}={near}" for near in (below, above) if near > 0)
    return [f"{name} {value} is not a multiple of {of_name} {of}: {value} % {of} = {value % of}. Use {uses}."]


def dropout_rate(name: str, value: float) -> list[str]:
    """Report a dropout rate outside [0, 1).

    >>> dropout_rate("dropout", 1.0)
    ['dropout is 1.0; it must be at least 0 and below 1. Use dropout=0.0 to switch it off.']
    """
    if 0 <= value < 1:
        return []
    return [f"{name} is {value}; it must be at least 0 and below 1. Use {name}=0.0 to switch it off."]


def depth(value: int, known: Iterable[int]) -> list[str]:
    """Report a number of layers that is not known, with the nearest known one.

    >>> depth(17, [16, 19])
    ['depth is 17; allowed are 16, 19. Use depth=16.']
    """
    known = list(known)
    if value in known or value < 1:
        return []
    near = min(known, key=lambda each: abs(each - value))
    return [f"depth is {value}; allowed are {', '.join(map(str, known))}. Use depth={near}."]
