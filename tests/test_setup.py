"""The set-up brings an MPI, and an mpi4jax built with it: two processes sum an array through both."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import jax, jax.numpy as jnp
import mpi4jax
from mpi4py import MPI
comm = MPI.COMM_WORLD.Clone()
total = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm))(jnp.arange(3.0) + comm.rank)
# in one piece, or the lines of the two processes mix
sys.stdout.write(f"rank {comm.rank} of {comm.size} {total.tolist()}\\n")
"""


def test_two_processes_sum_through_mpi():
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert mpiexec is not None, "no mpiexec: run `uv sync`"
    command = [mpiexec, "-n", "2", sys.executable, "-m", "mpi4py", "-c", PROGRAM]
    environment = {**os.environ, "MPI4JAX_NO_WARN_JAX_VERSION": "1", "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {i} of 2 [1.0, 3.0, 5.0]" for i in range(2)]
