"""`launch local`: start all ranks on this machine, by the mpiexec of this Python's environment."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardtrain.islands.binding import device_environment
from shardtrain.islands.launcher_variables import drop_launch_variables
from shardtrain.islands.network import ADDRESS, LOOPBACK, find_address
from shardtrain.islands.rank_environment import RankEnvironment
from shardtrain.islands.rank_placement import pick_number
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
    return replace(mpi.launch_by(job, mpiexec, environ, this_machine=True), unset=_list_unset(environ))


def launch_islands(job: Job, options: mpi.MpiOptions, environ: Mapping[str, str]) -> tuple[Launch, ...]:
    """Return the command of each elastic island: a process of its own, which knows no rank and needs no MPI.

    An island of several processes is a launch of its own, by MPI.

    Raises:
      ValueError: the interface does not exist, or the islands cannot share the GPUs evenly.
    """
    address = {ADDRESS: find_address(job.interface)} if job.interface else {}
    # the settings of MPI's interfaces are for ranks
    common = replace(job, interface=None, processes_per_island=1).rank_environment(environ) | address
    return tuple(
        Launch(
            lines=_list_words(job, number, options),
            environment=common | device_environment(place_here(number, job.islands), environ),
            unset=_list_unset(environ),
            folder=job.folder,
        )
        for number in range(job.islands)
    )


def _list_words(job: Job, number: int, options: mpi.MpiOptions) -> tuple[tuple[str, ...], ...]:
    """Return the command of an elastic island."""
    if job.processes_per_island == 1:
        return job.program, _select_devices(job.arguments, number, job.islands)
    # it may start in another folder than this process
    logs = str((job.logs / f"island-{number}").absolute())
    own = ("--islands", "1", "--processes-per-island", job.processes_text, "--logs", logs)
    by = () if options.mpiexec is None else ("--mpiexec", options.mpiexec)
    return (*job.program, "launch", *own, *by), ("--", *job.arguments)


def place_here(number: int, islands: int) -> RankEnvironment:
    """Return the place of an island among those of this machine, which share its GPUs and cores."""
    return RankEnvironment(
        launcher="none",
        rank=number,
        size=islands,
        local_rank=number,
        local_size=islands,
        host=socket.gethostname(),
    )


def _list_unset(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in environ if name not in drop_launch_variables(environ, keep_settings=True))


def _select_devices(arguments: Sequence[str], number: int, islands: int) -> tuple[str, ...]:
    """Replace --cpu-devices 2,1, one number for each island, by that of an island, which finds no rank.

    >>> _select_devices(("train", "run.py", "--cpu-devices", "2,1", "--seed=3"), 1, 2)
    ('train', 'run.py', '--cpu-devices', '1', '--seed=3')
    """
    found = list(arguments)
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != "--cpu-devices":
            continue
        index = at if equals else at + 1
        numbers = value if equals else "".join(arguments[index : index + 1])
        if "," in numbers:
            chosen = pick_number(name, numbers.split(","), number, islands)
            found[index] = f"{name}={chosen}" if equals else chosen
    return tuple(found)


LAUNCHER = Launcher(
    summary="by mpiexec on this machine (the default; with --hosts or --hostfile it is mpi)",
    options=mpi.MpiOptions,
    launch=launch,
    hosts=mpi.read_hosts,
    restarts=mpi.read_restarts,
    elastic=launch_islands,
)
