"""Run programs that might crash or hang, such as the start of MPI, in child processes. No MPI, no jax."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from shardtrain.doctor.check import Facts
from shardtrain.islands.launcher_variables import LAUNCHERS, drop_launch_variables
from shardtrain.islands.mpi_library import find_vendor, library_environment
from shardtrain.islands.rank_environment import RankEnvironment


def run_child(
    program: str, environ: Mapping[str, str], timeout_seconds: float, arguments: Sequence[str] = ()
) -> Facts:
    """Run a program that prints a JSON object per line, and return the merged objects.

    Args:
      program: Python source code.
      environ: environment of the parent; the child gets it without variables of a launcher.
      timeout_seconds: seconds until the child and its own children are killed.
      arguments: arguments of the program.

    Returns:
      The printed facts, and `died`: None if the program succeeded, else a text about its end.

    >>> run_child("print('{\\"a\\": 1}'); raise SystemExit('no b')", {}, 30.0)
    {'a': 1, 'died': 'no b'}
    """
    own = drop_launch_variables(environ, keep_settings=False)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", program, *arguments]
    child = subprocess.Popen(command, env=own, start_new_session=True, **pipes)
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


LIBRARY_SECONDS = 60.0


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
    program = "import json; from mpi4py import MPI; print(json.dumps({'library': MPI.Get_library_version()}))"
    facts = run_child(program, {**environ, **library_environment(environ)}, LIBRARY_SECONDS)
    if "library" not in facts:
        return f"mpi4py does not start: {facts['died']}"
    # srun and flux start the ranks of any MPI
    launcher = LAUNCHERS[environment.launcher].mpi_vendor
    if launcher is None or is_compatible(launcher, find_vendor(facts["library"])):
        return None
    version = facts["library"].splitlines()[0]
    return (
        f"the ranks were started by {environment.launcher}, and mpi4py belongs to another MPI"
        f" ({version.strip()}): it"
        f" would not start, or each of {environment.size} ranks would be alone"
    )
