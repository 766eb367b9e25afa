"""Mistakes of typing on a command line that its parsers would call an unknown option or value. No jax."""

import re
from collections.abc import Sequence

_DASHED = re.compile("[\u2010-\u2015\u2212]+([a-z][a-z-]*)(=.*)?", re.DOTALL)
"""An option behind another dash than the hyphen, which word processors and web pages make of two hyphens."""

_AXIS = re.compile(r"[a-z]+=-?\d+")


def check_words(words: Sequence[str]) -> None:
    """Refuse an option behind another dash than hyphens, and axes of a mesh that are words of their own.

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
