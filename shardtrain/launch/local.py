"""`launch local`: all ranks on this machine, by the mpiexec of this Python's environment."""

from collections.abc import Mapping
from dataclasses import replace

from shardtrain.islands.network import LOOPBACK
from shardtrain.launch import mpi
from shardtrain.launch.job import Job, Launch

OTHERS = ("SLURM_", "SLURMD_", "PMI_", "PMIX_", "HYDI_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "PALS_")
"""What a batch system or a launcher around this process set, by how it begins."""


def launch(job: Job, mpiexec: mpi.Mpiexec, environ: Mapping[str, str]) -> Launch:
    """The command that starts a job on this machine.

    Raises:
      ValueError: the job names hosts.
    """
    if job.hosts:
        names = ",".join(host.name for host in job.hosts)
        raise ValueError(f"launch local is for this machine, and hosts are {names}; use: launch mpi")
    # nobody else is to connect: MPI, jax and gloo ask no one who he is
    job = replace(job, interface=job.interface or LOOPBACK)
    return mpi.launch(job, mpiexec, environ, here=True)


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what leads an mpiexec to other hosts: inside a batch job it would go there."""
    return {name: value for name, value in environ.items() if not name.startswith(OTHERS)}
