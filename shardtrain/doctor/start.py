"""Connect the launched ranks for the checks, or report why MPI does not start. Next: `runner.py`."""

import os
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from shardtrain.doctor.check import ControlChannel
from shardtrain.doctor.child import launch_problem
from shardtrain.islands.rank_environment import RankEnvironment
from shardtrain.islands.rank_placement import PROCESSES, find_placement, parse_processes, placement_problem


class SingleProcess:
    """The control channel of a single process, which exchanges nothing."""

    def __init__(self, name: str) -> None:
        self.names = [name]
        self.rank, self.size = 0, 1

    def all_gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> list[Any]:
        """Return the value in a list."""
        return [value]


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The connected ranks, or the reason why they cannot be connected.

    Args:
      controls: control channels: one to gather results, and one for each check.
      hosts: rank -> host.
      comm: the MPI communicator of all ranks; None for a single process.
      problem: why the launched ranks cannot exchange messages.
      islands_problem: why the ranks cannot be divided into islands.
    """

    controls: tuple[ControlChannel, ...]
    hosts: tuple[str, ...]
    comm: Any
    problem: str | None = None
    islands_problem: str | None = None


def connect_ranks(
    environment: RankEnvironment, environ: Mapping[str, str], num_controls: int, patience_seconds: float
) -> Connection:
    """Connect the ranks.

    Args:
      environment: rank, size and host of this process.
      environ: the environment variables.
      num_controls: number of control channels to make.
      patience_seconds: seconds to wait for the other ranks, and for MPI to start.

    Raises:
      bridge.RankTimeout: a rank sent nothing, although MPI started on it.
    """
    name = f"rank {environment.rank} (host {environment.host})" if environment.size > 1 else environment.host
    alone = Connection(controls=(SingleProcess(name),) * num_controls, hosts=(environment.host,), comm=None)
    if environment.size == 1:
        return alone
    # 1. find mistakes of the launch that need no MPI
    if problem := launch_problem(environment, environ):
        return replace(alone, problem=problem)
    who = f"rank {environment.rank} of {environment.size} (host {environment.host})"
    # 2. start MPI, watched by a child process: it may end this process without a message
    with watch_mpi_start(who, 2 * patience_seconds):
        from shardtrain.islands.bridge import Control, world
        from shardtrain.islands.membership import format_other_mpi, rank_name

        try:
            comm = world()
        except ValueError as problem:
            return replace(alone, problem=str(problem))
        if (comm.rank, comm.size) != (environment.rank, environment.size):
            return replace(alone, problem=format_other_mpi(environment, comm.rank, comm.size))
        controls = tuple(Control(comm) for _ in range(num_controls))
        hosts = controls[0].all_gather("start", environment.host, patience_seconds)
    # 3. assign ranks to islands; a mistake there must not keep the other checks from running
    problem, names = None, [f"rank {rank} (host {host})" for rank, host in enumerate(hosts)]
    try:
        processes = parse_processes(environ.get(PROCESSES, "1"))
        problem = placement_problem(environment.size, processes)
    except ValueError as error:
        problem, processes = str(error), 1
    if problem is None:
        placements = [find_placement(rank, environment.size, processes) for rank in range(environment.size)]
        names = [rank_name(placement, host) for placement, host in zip(placements, hosts, strict=True)]
    for control in controls:
        control.names = names
        control.patience_seconds = patience_seconds
    return Connection(controls=controls, hosts=tuple(hosts), comm=comm, islands_problem=problem)


def late_text(who: str, after_seconds: float) -> str:
    """Return the message for a rank on which MPI does not start.

    >>> late_text("rank 1 of 2 (host a)", 60.0)[:65]
    'shardtrain doctor: rank 1 of 2 (host a): MPI did not start within'
    """
    return (
        f"shardtrain doctor: {who}: MPI did not start within {after_seconds:.0f} s; the hosts may not"
        " reach each other, or their MPIs differ. Run `shardtrain doctor` alone on each host, then on two of"
        " them\n"
    )


def format_ended(who: str) -> str:
    """Return the message for a rank that ended while MPI started.

    >>> format_ended("rank 1 of 2 (host a)")[:68]
    'shardtrain doctor: rank 1 of 2 (host a): the process ended while MPI'
    """
    return (
        f"shardtrain doctor: {who}: the process ended while MPI started, or because another rank"
        " ended; MPI's own message is above. Run `shardtrain doctor` alone on this host; with srun add"
        " --mpi=pmi2 or --mpi=pmix\n"
    )


@contextmanager
def watch_mpi_start(who: str, after_seconds: float) -> Iterator[None]:
    """Print a message if the code in this context ends this process, or does not end in time.

    A child process prints it: MPI_Init holds Python's global lock, so that no thread or signal handler runs.
    """
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(write)
            if not select.select([read], [], [], after_seconds)[0]:
                os.write(2, late_text(who, after_seconds).encode())
                os.kill(parent, signal.SIGKILL)
            elif os.read(read, 1) == b"":
                os.write(2, format_ended(who).encode())
        finally:
            os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.write(write, b".")
        os.close(write)
        os.waitpid(pid, 0)
