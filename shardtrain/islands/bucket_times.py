"""The sizes of the buckets that combiners send between islands, and how long each takes. No jax.

Next: `buckets.py`, which assigns arrays to buckets; `transfer.py`, which sends them.
"""

from collections.abc import Sequence
from threading import Lock


class BucketTimes:
    """The buckets of a run, in the order of sending, and the seconds that each took on the bridge.

    Attributes:
      sizes_bytes: bytes of each bucket's arrays, before a codec.

    >>> times = BucketTimes()
    >>> times.add([100, 200]), times.add([300])
    (0, 2)
    >>> times.record(1, 0.5), times.record(1, 1.5), times.record(2, 0.25)
    (None, None, None)
    >>> times.take(), times.take()
    ({1: 1.0, 2: 0.25}, {})
    """

    def __init__(self) -> None:
        self.sizes_bytes: list[int] = []
        self._seconds: dict[int, list[float]] = {}
        self._lock = Lock()

    def add(self, sizes_bytes: Sequence[int]) -> int:
        """Add the buckets of a combiner, and return the number of the first of them."""
        self.sizes_bytes += sizes_bytes
        return len(self.sizes_bytes) - len(sizes_bytes)

    def record(self, number: int, seconds: float) -> None:
        """Record that a bucket was packed, sent and unpacked; called by the thread that calls MPI."""
        with self._lock:
            self._seconds.setdefault(number, []).append(seconds)

    def take(self) -> dict[int, float]:
        """Return the mean seconds of each bucket that was recorded since the last call, by its number."""
        with self._lock:
            found, self._seconds = self._seconds, {}
        return {number: sum(each) / len(each) for number, each in sorted(found.items())}
