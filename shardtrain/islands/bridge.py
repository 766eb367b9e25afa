"""The dependency boundary to MPI: collectives of arrays over mpi4jax, all-gathers of values over mpi4py.

mpi4jax moves arrays inside a compiled program of one device; mpi4py all-gathers small values, and sends
heartbeats, on its own communicators. Next: `transfer.py`, which moves arrays between a mesh and these
collectives.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.islands.malloc import tune_malloc
from shardtrain.islands.mpi_library import check_started, find_vendor, library_environment, not_loaded_text
from shardtrain.islands.options import REDUCE
from shardtrain.islands.rank_timeout import RankTimeout, RankWait
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.system.standard_streams import wait_until_read
from shardtrain.system.stop_signals import STOPPING, keep_handlers

MOST_ELEMENTS = 2**31 - 1
"""The largest C int."""


def apply_in_chunks(
    operation: Callable[[jax.Array], jax.Array], x: jax.Array, most_elements: int = MOST_ELEMENTS
) -> jax.Array:
    """Apply an elementwise operation to an array in chunks of bounded size.

    Args:
      operation: array -> array of the same shape, possibly with more leading dims.
      x: array of any shape.
      most_elements: the largest number of elements of one call, 1 or more.

    Returns:
      The result of the operation for the whole array.

    >>> calls = []
    >>> double = lambda x: calls.append(x.shape) or 2 * x
    >>> apply_in_chunks(double, jnp.ones((2, 4)), 3).shape, calls
    ((2, 4), [(3,), (3,), (2,)])
    """
    if x.size <= most_elements:
        return operation(x)
    flat = x.reshape(-1)
    starts = range(0, x.size, most_elements)
    found = [operation(lax.slice_in_dim(flat, start, min(start + most_elements, x.size))) for start in starts]
    whole = jnp.concatenate(found, axis=-1)
    return whole.reshape(*whole.shape[:-1], *x.shape)


# MPI starts at its import, with a thread that would get its own arena of malloc
tune_malloc()
os.environ.update(library_environment(os.environ))

try:
    import mpi4jax
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ValueError(not_loaded_text(error)) from error
check_started(MPI.Is_initialized(), os.environ)
# libraries of MPI may have taken signals that ask a run to stop: UCX takes SIGHUP
keep_handlers(STOPPING)


class MpiGroup:
    """A communicator as a `combine.Group`; call its methods in a jit over one device.

    All ranks must call the same methods in the same order.

    Args:
      comm: the communicator of the ranks of the group; it is duplicated.
      mode: the algorithm of `all_reduce` over the whole group, see `options.Across.reduce`.
      hosts: rank -> host, for the hierarchical mode; None lets MPI find them.
      most_elements: the largest number of elements of one MPI call; larger arrays are sent in chunks.

    Attributes:
      traced_bytes: bytes of the arrays that this rank passes to MPI, over all calls traced so far.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        mode: str = "all_reduce",
        hosts: Sequence[Any] | None = None,
        most_elements: int = MOST_ELEMENTS,
    ) -> None:
        assert mode in REDUCE, mode
        self._most_elements = most_elements
        self._comm = comm.Dup()
        self._mode = mode
        self._hosts = hosts
        self._blocks: dict[int, MPI.Comm] = {}
        self.size: int = comm.size
        self.index: int = comm.rank
        self.traced_bytes = 0
        if mode == "hierarchical":
            _ = self._levels  # communicators are made here, where all ranks are, not while one traces

    def all_reduce(self, x: jax.Array, span: int | None = None) -> jax.Array:
        """Sum arrays over each block of `span` consecutive ranks, by default over all ranks.

        Args:
          x: float32 or int32, the same shape on every rank.
          span: divides the group's size.
        """
        span = self.size if span is None else span
        if span == 1 or x.size == 0:
            return x
        self.traced_bytes += x.nbytes
        return apply_in_chunks(lambda chunk: self._sum(chunk, span), x, self._most_elements)

    def _sum(self, x: jax.Array, span: int) -> jax.Array:
        if span < self.size:
            return mpi4jax.allreduce(x, op=MPI.SUM, comm=self._block(span))
        if self._mode == "root":
            return mpi4jax.bcast(mpi4jax.reduce(x, MPI.SUM, 0, comm=self._comm), 0, comm=self._comm)
        if self._mode == "hierarchical":
            # sum on each host, then over one rank of each: links between hosts carry one array a host
            host, leaders = self._levels
            x = mpi4jax.reduce(x, MPI.SUM, 0, comm=host)
            if host.rank == 0:
                x = mpi4jax.allreduce(x, op=MPI.SUM, comm=leaders)
            return mpi4jax.bcast(x, 0, comm=host)
        return mpi4jax.allreduce(x, op=MPI.SUM, comm=self._comm)

    def exchange(self, x: jax.Array, sources: Sequence[int]) -> jax.Array:
        """Permute arrays between ranks: rank i gets the array of rank `sources[i]`.

        Args:
          x: any dtype, the same shape on every rank.
          sources: a permutation of the ranks.
        """
        source, dest = sources[self.index], list(sources).index(self.index)
        if source == self.index or x.size == 0:
            return x
        self.traced_bytes += x.nbytes
        return self._move_bits(
            lambda bits: mpi4jax.sendrecv(bits, bits, source=source, dest=dest, comm=self._comm), x
        )

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Gather the arrays of all ranks, stacked to (size, ...)."""
        if self.size == 1 or x.size == 0:
            return jnp.broadcast_to(x, (self.size, *x.shape))
        self.traced_bytes += x.nbytes
        return self._move_bits(lambda bits: mpi4jax.allgather(bits, comm=self._comm), x)

    def broadcast(self, x: jax.Array, root: int = 0) -> jax.Array:
        """Send the array of rank `root` to every rank."""
        if self.size == 1 or x.size == 0:
            return x
        self.traced_bytes += x.nbytes
        return self._move_bits(lambda bits: mpi4jax.bcast(bits, root, comm=self._comm), x)

    def whole(self, x: jax.Array, op: Literal["sum", "max"] = "sum", *, stages: bool = False) -> jax.Array:
        """Return `x` unchanged: arrays are transferred whole, so partial values are already complete."""
        return x

    def _move_bits(self, move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Move an array without arithmetic; 16-bit floats as integers, because mpi4jax lacks these dtypes."""
        bits = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
        found = apply_in_chunks(move, bits, self._most_elements)
        return lax.bitcast_convert_type(found, x.dtype) if found.dtype != x.dtype else found

    @cached_property
    def _levels(self) -> tuple[MPI.Comm, MPI.Comm]:
        if self._hosts is None:
            host = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.index)
        else:
            host = self._comm.Split(sorted(set(self._hosts)).index(self._hosts[self.index]), self.index)
        return host, self._comm.Split(min(host.rank, 1), self.index)

    def _block(self, span: int) -> MPI.Comm:
        if span not in self._blocks:
            self._blocks[span] = self._comm.Split(self.index // span, self.index)
        return self._blocks[span]


KNOWN_SECONDS = 1.0
"""Seconds after which a wait tells the watchdog which ranks are missing."""


class Control:
    """All-gathers of small values between all ranks, with a name and a time limit.

    Args:
      comm: the communicator of all ranks; it is duplicated.
      names: rank -> its name in messages, such as "island 1 (host b)".
      patience_seconds: default time limit of an all-gather.
      report: receives one line when a wait takes longer than `RankWait.REPORT_SECONDS`.
      activity: the activity record of this process, which records every all-gather.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        names: Sequence[str] | None = None,
        patience_seconds: float = 1800.0,
        report: Callable[[str], None] = lambda text: None,
        activity: ActivityRecord | None = None,
    ) -> None:
        self._comm = comm.Dup()
        self.activity = activity or ActivityRecord()
        self.names = list(names or (f"rank {rank}" for rank in range(comm.size)))
        self.patience_seconds = patience_seconds
        self.report = report
        self._calls = 0

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._comm.size

    def all_gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> list[Any]:
        """Gather the values of all ranks on every rank; this is a barrier too.

        Args:
          name: the name of this all-gather; all ranks must join the same one.
          value: any JSON value.
          timeout_seconds: time limit; None means `patience_seconds`.

        Returns:
          The values by rank.

        Raises:
          RankTimeout: names the ranks that did not join in time, or that joined another all-gather.
        """
        patience = self.patience_seconds if timeout_seconds is None else timeout_seconds
        # the n-th call has a tag of its own, so a rank that is ahead cannot be taken for one that is here
        tag = self._calls % 32000
        self._calls += 1
        message = json.dumps([name, value]).encode()
        sent = [self._comm.Isend(message, rank, tag) for rank in range(self.size) if rank != self.rank]
        found: dict[int, Any] = {self.rank: [name, json.loads(message)[1]]}
        self.activity.num_collectives += 1
        with self.activity.at(name, waits=True, kind="islands"):
            self._receive(name, tag, found, patience)
        # ranks that run different code join different all-gathers: name both, do not mix their values
        elsewhere = {rank: there for rank, (there, _) in sorted(found.items()) if there != name}
        if elsewhere:
            others = ", ".join(f"{self.names[rank]} at {there!r}" for rank, there in elsewhere.items())
            here = _values(name, found)
            raise RankTimeout(f"{self.names[self.rank]} is at {name!r}, but {others}", list(elsewhere), here)
        with self.activity.at(f"{name}: sending", waits=True, kind="islands"):
            MPI.Request.Waitall(sent)
        self.activity.last_collective = name
        return [found[rank][1] for rank in range(self.size)]

    def _receive(self, name: str, tag: int, found: dict[int, Any], patience: float) -> None:
        wait = RankWait(name, self.names, patience, self.report, longest_nap_seconds=2e-3)
        status = MPI.Status()
        # receive from whoever sends; record the missing ranks, report them once, and give up in the end
        while len(found) < self.size:
            if self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
                buffer = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv(buffer, status.source, tag)
                found[status.source] = json.loads(bytes(buffer))
                wait.restart_naps()
                continue
            missing = [rank for rank in range(self.size) if rank not in found]
            if wait.seconds > KNOWN_SECONDS:
                self.activity.awaits(tuple(missing))
            wait.nap(missing, _values(name, found))


def _values(name: str, found: Mapping[int, Any]) -> dict[int, Any]:
    """Return the values of the ranks that joined this all-gather."""
    return {rank: value for rank, (there, value) in found.items() if there == name}


def world() -> MPI.Comm:
    """Return the communicator of all launched ranks; an uncaught exception then ends all ranks."""
    if MPI.COMM_WORLD.size > 1:
        sys.excepthook = _end_all
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ValueError(
                "this MPI was started without MPI_THREAD_MULTIPLE, and several threads call it here; use an"
                " MPI that was built with it, and unset what lowers the level (MPI4PY_RC_THREAD_LEVEL)"
            )
    return MPI.COMM_WORLD


def library_facts() -> dict[str, str]:
    """Return `library`, `vendor`, `standard` (version) and `threads` (level) of the running MPI."""
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
    }
    library = MPI.Get_library_version().rstrip("\0")
    return {
        "library": library.splitlines()[0].strip(),
        "vendor": find_vendor(library),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": levels.get(MPI.Query_thread(), "multiple"),
    }


def _end_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    traceback.print_exception(kind, error, trace)
    end_all(1)


def end_all(code: int) -> NoReturn:
    """End every rank by MPI_Abort; after a plain exit the others would wait for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    wait_until_read()
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


class HeartbeatChannel:
    """The channel of heartbeats between rank 0 and every other rank, on a separate communicator.

    Nothing waits: no message is sent while an earlier one with its tag is still under way to the rank. The
    constructor is a collective call of all ranks.

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
