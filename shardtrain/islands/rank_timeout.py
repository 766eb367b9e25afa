"""The error for ranks that do not join a collective in time, and its message. No MPI."""

from collections.abc import Mapping, Sequence
from typing import Any


class RankTimeout(RuntimeError):
    """Ranks did not join a collective or send a message in time.

    Args:
      text: the message, with names and seconds.
      ranks: the missing ones.
      received: rank -> value, of the ranks that joined.
    """

    def __init__(self, text: str, ranks: Sequence[int], received: Mapping[int, Any] | None = None) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.received = dict(received or {})


def missing_text(name: str, missing: Sequence[str], waited_seconds: float) -> str:
    """Return the message that names the missing ranks.

    >>> missing_text("start", ["island 1 (host b)"], 12.34)
    "island 1 (host b) did not reach 'start' within 12 s"
    """
    return f"{', '.join(missing)} did not reach {name!r} within {waited_seconds:.0f} s"
