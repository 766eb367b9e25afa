"""Decide for all ranks whether to pass GPU memory to MPI, after a test in a child process."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from shardtrain.islands.launcher_variables import drop_launch_variables

if TYPE_CHECKING:
    from shardtrain.islands.membership import Islands

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
