"""Check the options of a model's configuration.

Each check returns a list of problems, empty if there are none, so that a configuration reports all of them at
once.
"""

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


def read_number(
    name: str, text: str, problems: list[str], *, least: int | None = None, above: bool = False
) -> Any:
    """Read a number from the text of an option, and add to `problems` if it is none or out of range.

    Args:
      name: the name of the number, for the problem.
      text: the text.
      problems: the list that is added to.
      least: the smallest whole number that is allowed; None means that it may be any number of 0 or more.
      above: whether a number that need not be whole must be above 0.

    >>> problems = []
    >>> read_number("rank", "1.5", problems, least=1), problems
    (1, ["rank is '1.5', and it is a whole number of 1 or more"])
    """
    if least is not None:
        if text.isascii() and text.isdecimal() and int(text) >= least:
            return int(text)
        problems.append(f"{name} is {text!r}, and it is a whole number of {least} or more")
        return least
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (above and number == 0):
        problems.append(f"{name} is {text!r}, and it is a number {'above 0' if above else 'of 0 or more'}")
    return number


def read_pairs(text: str, known: Iterable[str], needed: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Read the text of an option such as "rank=8,alpha=16": return key -> value, and problems of the keys.

    >>> read_pairs("alpha=8,alpha=4,to=q", ["rank", "alpha"], ["rank"])[1]
    ['rank is missing', 'alpha is given 2 times', "no key 'to'"]
    """
    parts = [part.partition("=") for part in text.split(",")] if text else []
    pairs = [(name, value) for name, _, value in parts]
    given, known = dict(pairs), list(known)
    found = [f"{name} is missing" for name in needed if name not in given]
    counts = Counter(name for name, _ in pairs)
    found += [f"{name} is given {n} times" for name, n in counts.items() if n > 1]
    return given, found + [f"no key {name!r}" for name in given if name not in known]


def refuse(owner: str, problems: Sequence[str]) -> None:
    """Raise one ValueError that lists every problem; do nothing if there is none.

    Raises:
      ValueError: if `problems` is not empty.
    """
    if problems:
        raise ValueError("\n".join([f"{owner}:", *(f"  {problem}" for problem in problems)]))
