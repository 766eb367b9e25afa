"""Find the library of MPI, its vendor, and whether it takes GPU memory, or explain what to install. No MPI.

Next: `bridge.py`, which loads it.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardtrain.islands.launcher_variables import drop_launch_variables

if TYPE_CHECKING:
    from shardtrain.islands.membership import Islands

LIBRARY = "MPI4PY_LIBMPI"
"""The variable of mpi4py with the path of the library, or folders to search."""

NO_WARNING = "MPI4JAX_NO_WARN_JAX_VERSION"
"""The variable that disables the warning of mpi4jax about a jax newer than its list."""

PACKAGES = ("mpi4py", "mpi4jax")


def library_environment(environ: Mapping[str, str], prefix: str = sys.prefix) -> dict[str, str]:
    """Return the variables that mpi4py and mpi4jax need at their import, without those that are set.

    mpi4py searches MPI in the environment of the running Python. In layered environments, as by `uv run
    --with`, mpi4py itself and MPI are in another one. The warning of mpi4jax is disabled because
    pyproject.toml bounds jax, and the tests run with its newest version.

    Args:
      environ: the environment variables of the process.
      prefix: the folder of the running Python.
    """
    found = {} if NO_WARNING in environ else {NO_WARNING: "1"}
    spec = None if LIBRARY in environ else importlib.util.find_spec("mpi4py")
    if spec is None or spec.origin is None:
        return found
    # PREFIX/lib/pythonX.Y/site-packages/mpi4py/__init__.py
    home = Path(spec.origin).parents[4]
    # the empty entry at the end stands for the libraries of the system
    return found if home == Path(prefix) else {**found, LIBRARY: f"{home / 'lib'}{os.pathsep}"}


def list_not_installed() -> list[str]:
    """Return the packages for MPI that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


VENDORS = {
    "openmpi": r"Open ?MPI|OpenRTE|PRRTE|prterun",
    "intel": r"Intel\(R\) MPI",
    "hydra": r"HYDRA|MPICH|MVAPICH",
}
"""Vendor -> pattern of the version text of its library or its mpiexec."""


def find_vendor(version: str) -> str:
    """Find the vendor of an MPI by the version text of its library or mpiexec; "other" if it is unknown.

    >>> find_vendor("Open MPI v5.0.3, package"), find_vendor("MPICH Version: 5.0.2"), find_vendor("?")
    ('openmpi', 'hydra', 'other')
    """
    return next((vendor for vendor, pattern in VENDORS.items() if re.search(pattern, version)), "other")


def not_loaded_text(error: BaseException) -> str:
    """Return the message for launched ranks whose MPI cannot be loaded.

    >>> not_loaded_text(ImportError("no 'mpi4jax'")).splitlines()[0]
    "several processes were launched, and MPI cannot be loaded: ImportError: no 'mpi4jax'"
    """
    reason = " ".join(str(error).split())
    return (
        f"several processes were launched, and MPI cannot be loaded: {type(error).__name__}: {reason}\n"
        "Install shardtrain[mpi] (README, Installing), or rebuild the installed packages;"
        " `shardtrain doctor` finds out what does not fit. One process, without a launcher, needs no MPI."
    )


def check_started(is_started: bool, environ: Mapping[str, str]) -> None:
    """Check that mpi4py has started MPI at its import.

    Raises:
      ValueError: mpi4py was configured not to initialize MPI.
    """
    if not is_started:
        variable = environ.get("MPI4PY_RC_INITIALIZE")
        setting = "mpi4py.rc.initialize" if variable is None else f"MPI4PY_RC_INITIALIZE={variable}"
        raise ValueError(
            f"mpi4py did not start MPI when it was imported, because of {setting}, and ranks cannot"
            " communicate without it; use `unset MPI4PY_RC_INITIALIZE`, and set mpi4py.rc.initialize nowhere"
        )


PROBE = """
import jax, jax.numpy as jnp, mpi4jax
from mpi4py import MPI
x = jnp.arange(1 << 16, dtype=jnp.float32)
comm = MPI.COMM_SELF.Clone()
y = jax.jit(lambda x: mpi4jax.sendrecv(x, x, 0, 0, comm=comm))(x)
assert jax.devices()[0].platform == "gpu" and (x == y).all()
"""


def cuda_aware(
    command: Sequence[str] = (sys.executable, "-c", PROBE), timeout_seconds: float = 120.0
) -> bool:
    """Return whether MPI accepts GPU memory, tested in a child process, which may crash.

    Args:
      command: the command of the child; exit code 0 means success.
      timeout_seconds: time limit after which the test has failed.
    """
    # the child is no rank of this run
    environ = drop_launch_variables(os.environ, keep_settings=False)
    environ |= {"MPI4JAX_USE_CUDA_MPI": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def decide_device_memory(
    wanted: Literal["auto", "device", "host"], islands: "Islands", platform: str, probe: Callable[[], bool]
) -> bool:
    """Return whether to pass device memory to MPI: True on all ranks if every rank's probe succeeded.

    Args:
      wanted: "host" disables it, "device" requires it, "auto" uses it if all probes succeed.
      islands: the islands of the run.
      platform: the platform of this island's devices.
      probe: the test, such as `cuda_aware`.

    Raises:
      ValueError: "device" is required, and a probe failed.
    """
    # of several processes, two could start a gather of jax and a message of MPI in opposite orders
    possible = wanted != "host" and platform == "gpu" and islands.placement.num_processes == 1
    able = possible and probe()
    all_able = islands.control.all_gather("device memory", able)
    if wanted == "device" and not all(all_able):
        names = [name for name, able in zip(islands.control.names, all_able, strict=True) if not able]
        raise ValueError(
            f"bridge memory is 'device', but MPI does not take device memory on {', '.join(names)};"
            " use 'host', or an MPI and mpi4jax built for CUDA and one process per island"
        )
    return all(all_able)
