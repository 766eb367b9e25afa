"""Ranks that did not come: the error, and its words. No MPI."""

from collections.abc import Sequence


class Missing(RuntimeError):
    """Ranks did not come to where the others are.

    Args:
      text: who, where and for how long.
      ranks: who is missing.
    """

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


def missing_text(name: str, missing: Sequence[str], waited_seconds: float) -> str:
    """Who did not come.

    >>> missing_text("start", ["island 1 (host b)"], 12.34)
    "island 1 (host b) did not come to 'start' within 12 s"
    """
    return f"{', '.join(missing)} did not come to {name!r} within {waited_seconds:.0f} s"
