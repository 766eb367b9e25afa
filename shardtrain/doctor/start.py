"""Connect the launched processes for the checks, or find out why MPI does not start.

Next: `examine.py`.
"""

import os
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardtrain.doctor.check import ControlChannel
from shardtrain.doctor.mpi_vendor import launch_problem
from shardtrain.islands.rank_environment import RankEnvironment
from shardtrain.islands.seat import PROCESSES, find_seat, parse_processes, seat_problem


class Alone:
    """The control channel of a single process, which exchanges nothing."""

    def __init__(self, name: str) -> None:
        self.names = [name]
        self.rank, self.size = 0, 1

    def all_gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> list[Any]:
        """Return the value in a list."""
        return [value]


@dataclass(frozen=True, kw_only=True)
class Started:
    """The connected ranks, or why they cannot be connected.

    Args:
      controls: one for `examine`, and one for each check.
      hosts: rank -> host.
      comm: the communicator of all ranks; None: this process is alone.
      problem: why the launched ranks cannot exchange messages.
      seats_problem: why the ranks cannot be divided into islands.
    """

    controls: tuple[ControlChannel, ...]
    hosts: tuple[str, ...]
    comm: Any
    problem: str | None = None
    seats_problem: str | None = None


def start(
    environment: RankEnvironment, environ: Mapping[str, str], num_controls: int, patience_seconds: float
) -> Started:
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
    alone = Started(controls=(Alone(name),) * num_controls, hosts=(environment.host,), comm=None)
    if environment.size == 1:
        return alone
    # 1. a mistake of the launch that shows without MPI
    if problem := launch_problem(environment, environ):
        return _with(alone, problem)
    who = f"rank {environment.rank} of {environment.size} (host {environment.host})"
    # 2. start MPI, watched by a child: it may end this process without a word
    with last_words(who, 2 * patience_seconds):
        from shardtrain.islands.bridge import Control, world
        from shardtrain.islands.membership import other_mpi_text, rank_name

        try:
            comm = world()
        except ValueError as problem:
            return _with(alone, str(problem))
        if (comm.rank, comm.size) != (environment.rank, environment.size):
            return _with(alone, other_mpi_text(environment, comm.rank, comm.size))
        controls = tuple(Control(comm) for _ in range(num_controls))
        hosts = controls[0].all_gather("start", environment.host, patience_seconds)
    # 3. the seats of the ranks; a mistake there must not keep the other checks from running
    problem, names = None, [f"rank {rank} (host {host})" for rank, host in enumerate(hosts)]
    try:
        processes = parse_processes(environ.get(PROCESSES, "1"))
        problem = seat_problem(environment.size, processes)
    except ValueError as error:
        problem, processes = str(error), 1
    if problem is None:
        seats = [find_seat(rank, environment.size, processes) for rank in range(environment.size)]
        names = [rank_name(seat, host) for seat, host in zip(seats, hosts, strict=True)]
    for control in controls:
        control.names = names
        control.patience_seconds = patience_seconds
    return Started(controls=controls, hosts=tuple(hosts), comm=comm, seats_problem=problem)


def _with(alone: Started, problem: str) -> Started:
    return Started(controls=alone.controls, hosts=alone.hosts, comm=None, problem=problem)


def late_text(who: str, after_seconds: float) -> str:
    """Return the message for a rank on which MPI does not start.

    >>> late_text("rank 1 of 2 (host a)", 60.0)[:65]
    'shardtrain doctor: rank 1 of 2 (host a): MPI did not start within'
    """
    return (
        f"shardtrain doctor: {who}: MPI did not start within {after_seconds:.0f} s; a host may not be"
        " reached by"
        " the others, or their MPIs differ. Run `shardtrain doctor` alone on each host, then on two of them\n"
    )


def dead_text(who: str) -> str:
    """Return the message for a rank that ended while MPI started.

    >>> dead_text("rank 1 of 2 (host a)")[:68]
    'shardtrain doctor: rank 1 of 2 (host a): the process ended while MPI'
    """
    return (
        f"shardtrain doctor: {who}: the process ended while MPI started, or by another rank's end; what"
        " MPI says"
        " of it stands above. Run `shardtrain doctor` alone on this host; with srun add --mpi=pmi2 or"
        " --mpi=pmix\n"
    )


@contextmanager
def last_words(who: str, after_seconds: float) -> Iterator[None]:
    """Report from a child process if the enclosed code ends this process, or does not end in time.

    MPI_Init keeps Python's lock while it waits, so no thread or signal handler of this process could run; a
    child process watches instead.
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
                os.write(2, dead_text(who).encode())
        finally:
            os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.write(write, b".")
        os.close(write)
        os.waitpid(pid, 0)
