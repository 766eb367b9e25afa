"""Wait for other ranks with a time limit, and name those that are missing. No MPI."""

import time
from collections.abc import Callable, Mapping, Sequence
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


class RankWait:
    """A polled wait for other ranks: sleeps between polls, reports a long wait once, and ends at a limit.

    Args:
      name: the name of the message or collective.
      names: rank -> its name in messages.
      patience_seconds: time limit of the wait.
      report: receives one line after `REPORT_SECONDS`.
      longest_nap_seconds: longest sleep between two polls.
    """

    REPORT_SECONDS = 30.0

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        patience_seconds: float,
        report: Callable[[str], None] = lambda text: None,
        longest_nap_seconds: float = 2e-4,
    ) -> None:
        self._name, self._names, self._patience_seconds = name, names, patience_seconds
        self._report, self._longest_nap_seconds = report, longest_nap_seconds
        self._start_seconds, self._nap_seconds, self._is_reported = time.monotonic(), 0.0, False

    @property
    def seconds(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._start_seconds

    def restart_naps(self) -> None:
        """Poll without sleeping again, because something arrived."""
        self._nap_seconds = 0.0

    def nap(self, missing: Sequence[int], received: Mapping[int, Any] | None = None) -> None:
        """Sleep until the next poll, longer each time.

        Raises:
          RankTimeout: the time limit is over; names the missing ranks.
        """
        limit_seconds = self._patience_seconds
        if not self._is_reported:
            limit_seconds = min(limit_seconds, self.REPORT_SECONDS)
        if self.seconds > limit_seconds:
            text = missing_text(self._name, [self._names[rank] for rank in missing], self.seconds)
            if self.seconds > self._patience_seconds:
                raise RankTimeout(text, missing, received)
            self._is_reported = True
            self._report(f"waiting: {text}")
        time.sleep(self._nap_seconds)
        self._nap_seconds = min(self._nap_seconds + 1e-5, self._longest_nap_seconds)


def missing_text(name: str, missing: Sequence[str], waited_seconds: float) -> str:
    """Return the message that names the missing ranks.

    >>> missing_text("start", ["island 1 (host b)"], 12.34)
    "island 1 (host b) did not reach 'start' within 12 s"
    """
    return f"{', '.join(missing)} did not reach {name!r} within {waited_seconds:.0f} s"
