"""Read and check words of the command line before a parser reads them. No jax."""

import re
from collections.abc import Mapping, Sequence

_DASHED = re.compile("[\u2010-\u2015\u2212]+([a-z][a-z-]*)(=.*)?", re.DOTALL)
"""An option after a dash that is no hyphen; word processors and web pages replace two hyphens by one."""

_AXIS = re.compile(r"[a-z]+=-?\d+")


def check_words(words: Sequence[str]) -> None:
    """Refuse options that begin with a dash instead of hyphens, and mesh axes that spaces separate.

    Raises:
      ValueError: there is one.

    >>> check_words(["run.py", "--mesh", "data=2", "tensor=2"])
    Traceback (most recent call last):
      ...
    ValueError: --mesh has 'data=2' and 'tensor=2' as two words; join axes by commas: --mesh data=2,tensor=2
    """
    for word in words:
        if found := _DASHED.fullmatch(word):
            raise ValueError(
                f"{word!r} begins with a dash that is no hyphen; write --{found[1]}{found[2] or ''}"
            )
    parts = [
        part for word in words for part in (word.split("=", 1) if word.startswith("--mesh=") else [word])
    ]
    for name, first, after in zip(parts, parts[1:], parts[2:], strict=False):
        if name == "--mesh" and "=" in first and _AXIS.fullmatch(after):
            raise ValueError(
                f"--mesh has {first!r} and {after!r} as two words; join axes by commas:"
                f" --mesh {first.rstrip(',')},{after}"
            )


def find_values(words: Sequence[str], *names: str) -> list[str]:
    """Return the values of an option, given by any of its names, in the order of the command line.

    >>> find_values(["run.py", "--xla_preset=none", "--mesh", "data=2"], "--xla-preset")
    ['none']
    """
    return [
        value if equals else next(iter(words[number + 1 :]), "")
        for number, word in enumerate(words)
        for name, equals, value in [word.partition("=")]
        if name.replace("_", "-") in names
    ]


def list_too_small(values: Mapping[str, float | None], least: int = 1) -> list[str]:
    """Return a problem for each option below the least value; None means that it was not given.

    >>> list_too_small({"batch": 0, "top_k": None})
    ['--batch is 0; use 1 or more']
    """
    return [
        f"--{name.replace('_', '-')} is {value}; use {least} or more"
        for name, value in values.items()
        if value is not None and value < least
    ]
