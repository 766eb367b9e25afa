"""The ring all-reduce of a step as a state machine; the caller has the arithmetic. Next: `member.py`."""

from typing import Any, Protocol


class OwnSum(Protocol):
    """The sum of gradients over an island's own slots, which is kept until the step is committed."""

    def copy(self, num_chunks: int) -> "Sum":
        """Return a copy in chunks for one exchange; the own sum must not change with it."""
        ...


class Sum(Protocol):
    """A sum of gradients, cut into chunks."""

    def chunk(self, index: int) -> Any:
        """Return a chunk as a payload, which must not change before the next member has it."""
        ...

    def add(self, index: int, payload: Any) -> None:
        """Add a payload to a chunk."""
        ...

    def replace(self, index: int, payload: Any) -> None:
        """Replace a chunk by a payload."""
        ...

    def finish(self, index: int) -> None:
        """Replace a chunk, to which all are added, by what the others receive of it."""
        ...


class Ring:
    """The all-reduce of one member: bitwise equal on all, because each chunk is summed once around the ring.

    Args:
      total: the own sum; the whole sum at the end.
      index: number of this member in the ring.
      size: number of members.
    """

    def __init__(self, total: Sum, index: int, size: int) -> None:
        self.total = total
        self.hop = 0
        self._index, self._size = index, size

    @property
    def is_whole(self) -> bool:
        """Whether `total` is the sum of all members."""
        return self.hop == 2 * self._size - 2

    def payload(self) -> Any:
        """Return what this member sends to the next one in this hop."""
        return self.total.chunk((self._index - self.hop) % self._size)

    def receive(self, payload: Any) -> None:
        """Take what the member before sent in this hop, and continue with the next hop."""
        index = (self._index - self.hop - 1) % self._size
        take = self.total.add if self.hop < self._size - 1 else self.total.replace
        take(index, payload)
        if self.hop == self._size - 2:
            self.total.finish(index)
        self.hop += 1
