"""`launch local`: start all ranks on this machine, by the mpiexec of this Python's environment."""

from collections.abc import Mapping
from dataclasses import replace

from shardtrain.islands.launcher_variables import drop_launch_variables
from shardtrain.islands.network import LOOPBACK
from shardtrain.launch import mpi
from shardtrain.launch.job import Job
from shardtrain.launch.launcher import Launch, Launcher


def launch(job: Job, options: mpi.MpiOptions, environ: Mapping[str, str]) -> Launch:
    """Return the command that starts a job on this machine.

    Raises:
      ValueError: the job names hosts, or no mpiexec is found.
    """
    return launch_by(job, mpi.find_mpiexec(options.mpiexec), environ)


def launch_by(job: Job, mpiexec: mpi.Mpiexec, environ: Mapping[str, str]) -> Launch:
    """Return the command by which a known mpiexec starts a job on this machine.

    Raises:
      ValueError: the job names hosts.
    """
    if job.hosts:
        names = ",".join(host.name for host in job.hosts)
        raise ValueError(f"launch local is for this machine, and hosts are {names}; use: launch mpi")
    # on loopback nobody else can connect: MPI, jax and gloo authenticate no one
    job = replace(job, interface=job.interface or LOOPBACK)
    # inside a batch job an mpiexec would start its ranks on the hosts of that job
    unset = tuple(name for name in environ if name not in drop_launch_variables(environ, keep_settings=True))
    return replace(mpi.launch_by(job, mpiexec, environ, this_machine=True), unset=unset)


LAUNCHER = Launcher(
    summary="by mpiexec on this machine (the default; with --hosts or --hostfile it is mpi)",
    options=mpi.MpiOptions,
    launch=launch,
    hosts=mpi.read_hosts,
    restarts=mpi.read_restarts,
)
