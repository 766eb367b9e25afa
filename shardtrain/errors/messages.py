"""Build error messages: suggest near names, and list all problems at once. No jax."""

import difflib
from collections.abc import Iterable, Sequence

MOST_NAME = 100
"""Largest number of characters of a name in a message."""


def near(name: str, allowed: Iterable[str]) -> str:
    """Quote a name with the nearest allowed names, or with all of them if none is near.

    >>> near("embd", ["embed", "mlp"])
    "'embd' (did you mean 'embed'?)"
    >>> near("heds", ["heads", "kv_heads"])
    "'heds' (did you mean 'heads' or 'kv_heads'?)"
    """
    allowed = list(allowed)
    name = name if len(name) <= MOST_NAME else name[:MOST_NAME] + "..."
    close = difflib.get_close_matches(name, allowed, n=2)
    if close:
        return f"{name!r} (did you mean {' or '.join(map(repr, close))}?)"
    return f"{name!r} (known: {', '.join(allowed) or 'none'})"


def needs_library(what: str, library: str, extra: str) -> str:
    """Return the message for a missing library.

    >>> needs_library("images are", "pillow", "images").partition(":")[0]
    'images are read by the library pillow'
    """
    return (
        f"{what} read by the library {library}: install it with uv sync --extra {extra} in a clone, elsewhere"
        f" with pip install 'path/to/shardtrain[{extra}]'"
    )


def refuse(asked: str, problems: Sequence[str], most: int | None = None) -> None:
    """Raise one error that lists every problem, if there is one; see `problems_error`.

    Raises:
      ValueError: see `problems_error`.
    """
    if problems:
        raise problems_error(asked, problems, most)


def problems_error(asked: str, problems: Sequence[str], most: int | None = None) -> ValueError:
    """Return one error that lists every problem, one per line; at most `most`, and the number of others."""
    if most is not None and len(problems) > most:
        problems = [*problems[:most], f"and {len(problems) - most} more"]
    return ValueError(asked + ":" + "".join(f"\n  - {problem}" for problem in problems))
