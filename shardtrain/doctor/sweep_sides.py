"""The operations of `--sweep`, each as a call to MPI alone and as the bridge's call. Importing it starts MPI.

MPI alone is mpi4py on memory that is reused. The bridge is what a run uses: `Transfer` and `MpiGroup`
between a mesh and MPI, `Mailbox` between pipeline stages.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.islands.bridge import MPI, MpiGroup
from shardtrain.islands.mailbox import Mailbox
from shardtrain.islands.transfer import Transfer


class Sides(NamedTuple):
    """One operation at one size.

    Args:
      num_bytes: the size of the array that a rank ends up with.
      mpi: a call to MPI alone; returns what this rank received.
      bridge: the same by the bridge; None: the bridge has no such operation.
      is_right: whether what a call returned is right.
    """

    num_bytes: int
    mpi: Callable[[], Any]
    bridge: Callable[[], Any] | None
    is_right: Callable[[Any], bool]


class SweepSides:
    """Makes the sides of all operations.

    Args:
      comm: the ranks; duplicated for each side, so that their messages are separate.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        device = jax.local_devices()[0]
        mesh = Mesh(np.array([device]), ("data",))
        self._sharding = NamedSharding(mesh, PartitionSpec())
        # through the host's memory, as MPI that takes no device memory needs it
        self._transfer = Transfer(mesh, [MpiGroup(comm)])
        self._mailbox = Mailbox(comm, [f"rank {rank}" for rank in range(comm.size)])
        # ring: each rank sends to the next one and receives from the one before
        self._next, self._before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    @property
    def operations(self) -> Mapping[str, Callable[[int], Sides]]:
        """Name -> a function from bytes to the sides, in the order in which they are measured."""
        return {
            "broadcast": self.broadcast,
            "reduce": self.reduce,
            "all-reduce": self.all_reduce,
            "all-gather": self.all_gather,
            "exchange": self.exchange,
            "send/receive": self.send_receive,
        }

    def close(self) -> None:
        """End the threads of the bridge."""
        self._transfer.close()
        self._mailbox.close()

    def broadcast(self, num_bytes: int) -> Sides:
        """Send the array of rank 0 to every rank."""
        host, got = self._array(num_bytes), self._array(num_bytes)

        def mpi() -> np.ndarray:
            self._comm.Bcast(host if self._comm.rank == 0 else got, 0)
            return host if self._comm.rank == 0 else got

        return Sides(host.nbytes, mpi, self._bridge(_broadcast, host), self._is(1))

    def reduce(self, num_bytes: int) -> Sides:
        """Sum on rank 0 only; the bridge has none, because every island needs the sum."""
        host = self._array(num_bytes)
        got = np.empty_like(host)

        def mpi() -> np.ndarray | None:
            self._comm.Reduce(host, got, MPI.SUM, 0)
            return got if self._comm.rank == 0 else None

        is_sum = self._is(self._total)
        return Sides(host.nbytes, mpi, None, lambda found: found is None or is_sum(found))

    def all_reduce(self, num_bytes: int) -> Sides:
        """Sum on every rank."""
        host = self._array(num_bytes)
        got = np.empty_like(host)

        def mpi() -> np.ndarray:
            self._comm.Allreduce(host, got, MPI.SUM)
            return got

        return Sides(host.nbytes, mpi, self._bridge(_all_reduce, host), self._is(self._total))

    def all_gather(self, num_bytes: int) -> Sides:
        """Gather the arrays of all ranks on every rank; all of them together have the size asked for."""
        host = self._array(num_bytes // self._comm.size)
        got = np.empty((self._comm.size, *host.shape), host.dtype)

        def mpi() -> np.ndarray:
            self._comm.Allgather(host, got)
            return got

        ranks = np.arange(1, self._comm.size + 1, dtype=np.float32)[:, None]
        return Sides(got.nbytes, mpi, self._bridge(_all_gather, host), self._is(ranks))

    def exchange(self, num_bytes: int) -> Sides:
        """Send around the ring in a compiled program, as the combiners do."""
        host = self._array(num_bytes)
        return Sides(host.nbytes, self._sendrecv(host), self._bridge(_ring, host), self._is(self._before + 1))

    def send_receive(self, num_bytes: int) -> Sides:
        """Send around the ring through the mailbox, as pipeline stages do."""
        host = self._array(num_bytes)
        array = jax.device_put(host, self._sharding)

        def bridge() -> np.ndarray:
            self._mailbox.send(array, self._next, 0)
            return self._mailbox.receive(host.shape, host.dtype, self._before, 0, "an array of the sweep")

        return Sides(host.nbytes, self._sendrecv(host), bridge, self._is(self._before + 1))

    @property
    def _total(self) -> int:
        return self._comm.size * (self._comm.size + 1) // 2

    def _array(self, num_bytes: int) -> np.ndarray:
        """Return an array of about this size, filled with rank + 1."""
        return np.full(max(1, num_bytes // 4), self._comm.rank + 1, np.float32)

    def _is(self, expected: Any) -> Callable[[Any], bool]:
        return lambda found: bool((np.asarray(found) == expected).all())

    def _sendrecv(self, host: np.ndarray) -> Callable[[], np.ndarray]:
        got = np.empty_like(host)

        def mpi() -> np.ndarray:
            self._comm.Sendrecv(host, self._next, 0, got, self._before, 0)
            return got

        return mpi

    def _bridge(self, program: Any, host: np.ndarray) -> Callable[[], Any]:
        """Return a call that takes an array from the mesh through a program of the bridge and back."""
        array = jax.device_put(host, self._sharding)

        def call() -> Any:
            found = self._transfer.start(0, program, [array]).result()
            return jax.block_until_ready(self._transfer.land(0, found, [array])[0])

        return call


def _broadcast(arrays: list[jax.Array], group: MpiGroup) -> list[jax.Array]:
    return [group.broadcast(x) for x in arrays]


def _all_reduce(arrays: list[jax.Array], group: MpiGroup) -> list[jax.Array]:
    return [group.all_reduce(x) for x in arrays]


def _all_gather(arrays: list[jax.Array], group: MpiGroup) -> list[jax.Array]:
    return [group.all_gather(x) for x in arrays]


def _ring(arrays: list[jax.Array], group: MpiGroup) -> list[jax.Array]:
    sources = [(rank - 1) % group.size for rank in range(group.size)]
    return [group.exchange(x, sources) for x in arrays]
