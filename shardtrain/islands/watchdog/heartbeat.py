"""Exchange heartbeats between rank 0 and every other rank, on a separate communicator, without waiting.

A message is not sent while an earlier one with the same tag is still under way to the rank.
"""

from collections.abc import Iterator

from shardtrain.islands.bridge import MPI, end_all


class HeartbeatChannel:
    """The channel between watchdogs; its constructor is a collective call of all ranks.

    Args:
      comm: the communicator of all ranks; it is duplicated.
    """

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm = comm.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._under_way: dict[tuple[int, int], tuple[MPI.Request, bytes]] = {}

    @property
    def partners(self) -> list[int]:
        """The ranks with which this one exchanges heartbeats."""
        return [rank for rank in range(self.size) if rank != self.rank] if self.rank == 0 else [0]

    def send(self, rank: int, tag: int, data: bytes = b"") -> None:
        """Send a message to a rank, unless the last one with this tag is still under way to it."""
        before = self._under_way.get((rank, tag))
        if before is None or before[0].Test():
            self._under_way[rank, tag] = (self._comm.Isend(data, rank, tag), data)

    def received(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (rank, tag, data) of every message that has arrived."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            data = bytearray(status.Get_count(MPI.BYTE))
            rank, tag = status.source, status.tag
            self._comm.Recv(data, rank, tag)
            yield rank, tag, bytes(data)

    def is_all_sent(self) -> bool:
        """Return whether no message is under way."""
        return all(request.Test() for request, _ in self._under_way.values())

    def end_all(self, code: int) -> None:
        """End every rank."""
        end_all(code)
