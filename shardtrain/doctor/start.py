"""Connect the launched ranks for the checks, or report why MPI does not start. Next: `runner.py`.

Programs that might crash or hang, such as the start of MPI, run in child processes.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from shardtrain.doctor.check import Facts, RankContext
from shardtrain.islands.launcher_variables import LAUNCHERS, drop_launch_variables
from shardtrain.islands.mpi_library import find_vendor, library_environment
from shardtrain.islands.rank_environment import RankEnvironment
from shardtrain.islands.rank_placement import PROCESSES, find_placement, parse_processes

LIBRARY_SECONDS = 60.0
LIBRARY = "import json; from mpi4py import MPI; print(json.dumps({'library': MPI.Get_library_version()}))"


def run_child(program: str, environ: Mapping[str, str], timeout_seconds: float) -> Facts:
    """Run a program that prints a JSON object per line, and return the merged objects.

    Args:
      program: Python source code.
      environ: environment of the parent; the child gets it without variables of a launcher.
      timeout_seconds: seconds until the child and its own children are killed.

    Returns:
      The printed facts, and `died`: None if the program succeeded, else a text about its end.

    >>> run_child("print('{\\"a\\": 1}'); raise SystemExit('no b')", {}, 30.0)
    {'a': 1, 'died': 'no b'}
    """
    own = drop_launch_variables(environ, keep_settings=False)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", program], env=own, start_new_session=True, **pipes)
    try:
        out, err = child.communicate(timeout=timeout_seconds)
        died = None if child.returncode == 0 else _failure_text(child.returncode, err)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        died = f"it did not end within {timeout_seconds:.0f} s"
    facts: Facts = {}
    for line in out.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    return facts | {"died": died}


def _failure_text(code: int, err: str) -> str:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    # jax ends its own errors with a hint about filtered frames
    lines = [line for line in lines if not line.startswith(("For simplicity", "----"))]
    return lines[-1][:300] if lines else f"it ended with code {code}"


def is_compatible(launcher: str, library: str) -> bool:
    """Return whether a launcher of one vendor can start ranks that use a library of another.

    MPICH and Intel MPI use the same PMI. An unknown library counts as compatible.

    >>> is_compatible("hydra", "intel"), is_compatible("openmpi", "hydra")
    (True, False)
    """
    return library == "other" or (launcher == "openmpi") == (library == "openmpi")


def launch_problem(environment: RankEnvironment, environ: Mapping[str, str]) -> str | None:
    """Return why MPI would not start or not find the other ranks; None if it should work.

    A child process without launcher variables loads mpi4py, because that might end a rank of another MPI.
    """
    facts = run_child(LIBRARY, {**environ, **library_environment(environ)}, LIBRARY_SECONDS)
    if "library" not in facts:
        return f"mpi4py does not start: {facts['died']}"
    # srun and flux start the ranks of any MPI
    launcher = LAUNCHERS[environment.launcher].mpi_vendor
    if launcher is None or is_compatible(launcher, find_vendor(facts["library"])):
        return None
    return (
        f"the ranks were started by {environment.launcher}, and mpi4py belongs to another MPI"
        f" ({facts['library'].splitlines()[0].strip()}): it"
        f" would not start, or each of {environment.size} ranks would be alone"
    )


def connect_ranks(alone: RankContext, num_controls: int, patience_seconds: float) -> list[RankContext]:
    """Connect the ranks.

    Args:
      alone: the context of this process if it is the only one.
      num_controls: number of contexts to make, each with a control channel of its own.
      patience_seconds: seconds to wait for the other ranks, and for MPI to start.

    Returns:
      The contexts; with a `problem` if the launched ranks cannot be connected.

    Raises:
      bridge.RankTimeout: a rank sent nothing, although MPI started on it.
    """
    environment, size = alone.environment, alone.environment.size
    if size == 1:
        return [alone] * num_controls
    # 1. find mistakes of the launch that need no MPI
    if problem := launch_problem(environment, alone.environ):
        return [replace(alone, problem=problem)] * num_controls
    who = f"rank {environment.rank} of {size} (host {environment.host})"
    # 2. start MPI, watched by a child process: it may end this process without a message
    with watch_mpi_start(who, 2 * patience_seconds):
        from shardtrain.islands.bridge import Control, world
        from shardtrain.islands.membership import format_other_mpi, rank_name

        try:
            comm = world()
            if (comm.rank, comm.size) != (environment.rank, size):
                raise ValueError(format_other_mpi(environment, comm.rank, comm.size))
        except ValueError as problem:
            return [replace(alone, problem=str(problem))] * num_controls
        controls = [Control(comm, patience_seconds=patience_seconds) for _ in range(num_controls)]
        hosts = tuple(controls[0].all_gather("start", environment.host))
    # 3. assign ranks to islands; a mistake there must not keep the other checks from running
    problem, names = None, [f"rank {rank} (host {host})" for rank, host in enumerate(hosts)]
    try:
        processes = parse_processes(alone.environ.get(PROCESSES, "1"))
        names = [rank_name(find_placement(rank, size, processes), host) for rank, host in enumerate(hosts)]
    except ValueError as error:
        problem = str(error)
    for control in controls:
        control.names = names
    return [replace(alone, control=c, hosts=hosts, comm=comm, islands_problem=problem) for c in controls]


LATE = (
    "shardtrain doctor: {who}: MPI did not start within {seconds:.0f} s; the hosts may not reach each other,"
    " or their MPIs differ. Run `shardtrain doctor` alone on each host, then on two of them\n"
)
ENDED = (
    "shardtrain doctor: {who}: the process ended while MPI started, or because another rank ended; MPI's own"
    " message is above. Run `shardtrain doctor` alone on this host; with srun add --mpi=pmi2 or --mpi=pmix\n"
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
                os.write(2, LATE.format(who=who, seconds=after_seconds).encode())
                os.kill(parent, signal.SIGKILL)
            elif os.read(read, 1) == b"":
                os.write(2, ENDED.format(who=who).encode())
        finally:
            os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.write(write, b".")
        os.close(write)
        os.waitpid(pid, 0)
