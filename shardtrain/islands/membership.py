"""Join launched processes into islands, and make their channels: MPI, JAX runtimes, watchdog.

`join` runs before jax starts. Without a launcher there is one process, and MPI is never loaded. Next:
`transfer.py`.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from shardtrain.islands.binding import bind_devices, visible_list
from shardtrain.islands.jax_runtime import join_processes
from shardtrain.islands.options import Across
from shardtrain.islands.rank_environment import RankEnvironment, find_rank_environment
from shardtrain.islands.rank_placement import PROCESSES, RankPlacement, find_placement, parse_processes
from shardtrain.islands.transfer import Transfer
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.islands.watchdog.diagnosis import Peer, Watch
from shardtrain.islands.watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

    from shardtrain.islands.bridge import Control
    from shardtrain.islands.mailbox import Mailbox

START_SECONDS = 300.0
"""Seconds within which all ranks of a run must start."""


@dataclass(frozen=True, kw_only=True)
class Islands:
    """The islands of a run and the channels between them, for one of their processes.

    Args:
      placement: the island and index of this process.
      environment: its rank, as the launcher set it.
      control: the channel for named all-gathers of all ranks.
      comm: the MPI communicator of all ranks; messages use duplicates of it.
      first_ranks: island -> the rank of its first process.
      pids: rank -> its process id.
      hosts: rank -> its host.
    """

    placement: RankPlacement
    environment: RankEnvironment
    control: "Control"
    comm: "MPI.Comm"
    first_ranks: tuple[int, ...]
    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and messages for all ranks."""
        return self.environment.rank == 0

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Return the value of rank 0 on every rank."""
        return self.control.all_gather(name, value if self.is_first else None)[0]

    def all_gather_islands(self, name: str, value: Any) -> list[Any]:
        """Gather the value of the first process of each island on every rank."""
        values = self.control.all_gather(name, value)
        return [values[rank] for rank in self.first_ranks]

    def transfer(
        self, mesh: Mesh, across: Across = Across(), on_device: bool = False, *, joins: bool = True
    ) -> Transfer | None:
        """Make the transfer between this island's mesh and others; a collective call of all ranks.

        Args:
          mesh: the mesh of this island.
          across: the options of buckets and sums.
          on_device: whether MPI accepts device memory, see `cuda_aware`.
          joins: whether this island takes part in the transfer.

        Returns:
          None for an island that takes no part.
        """
        from mpi4py import MPI

        from shardtrain.islands.bridge import MpiGroup

        devices = sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id))
        num_processes = len({device.process_index for device in devices})
        copies_first = num_processes > 1 or (devices[0].platform != "cpu" and not on_device)
        # all islands must make the same buckets, whatever their devices are
        facts = self.control.all_gather("devices", [len(devices), copies_first])
        num_bucket_devices = min(num_devices for num_devices, _ in facts)
        copies_first = any(copies for _, copies in facts)
        groups: list[MpiGroup | None] = []
        for device in devices[:num_bucket_devices]:
            mine = device.process_index == jax.process_index()
            comm = self.comm.Split(0 if mine and joins else MPI.UNDEFINED, self.placement.island)
            groups.append(MpiGroup(comm, across.reduce) if mine and joins else None)
        if not joins:
            return None
        caps = (across.bucket_bytes, across.first_bucket_bytes)
        return Transfer(mesh, groups, *caps, on_device, self.control.activity, copies_first=copies_first)

    def mailbox(self, replica: int, stage: int, patience_seconds: float) -> "Mailbox":
        """Make the mailbox between pipeline stages; a collective call of all ranks.

        Args:
          replica: number of the pipeline of this island.
          stage: its stage in that pipeline.
          patience_seconds: time limit of a wait for a message.
        """
        from shardtrain.islands.mailbox import Mailbox

        comm = self.comm.Split(replica, stage)
        ranks = comm.allgather(self.environment.rank)
        names = [self.control.names[rank] for rank in ranks]
        control = self.control
        return Mailbox(comm, names, patience_seconds, control.report, control.activity, ranks)


def join(
    environ: Mapping[str, str] | None = None,
    report: Callable[[str], None] | None = None,
    activity: ActivityRecord | None = None,
) -> Islands | None:
    """Join the processes that were launched with this one, before jax starts.

    `jax.distributed` joins the processes of an island with several.

    Args:
      environ: environment variables, as the launcher set them; by default those of this process.
      report: receives a line with the missing ranks when the start takes long.
      activity: the activity record of this process, for its watchdog.

    Returns:
      The islands; None if this is the only process.

    Raises:
      ValueError: the processes do not fill the islands, or launcher and mpi4py belong to different MPIs.
      RankTimeout: a rank did not start in time.
    """
    environ = dict(os.environ if environ is None else environ)
    environment = find_rank_environment(environ)
    if environment.size == 1:
        return None
    from shardtrain.islands.bridge import Control, world

    # 1. start MPI; its ranks must be those of the launcher's variables
    comm = world()
    if (comm.rank, comm.size) != (environment.rank, environment.size):
        raise ValueError(format_other_mpi(environment, comm.rank, comm.size))
    # 2. the placement of every rank: its island, and its process there
    processes = parse_processes(environ.get(PROCESSES, "1"))
    placements = [find_placement(rank, environment.size, processes) for rank in range(environment.size)]
    control = Control(comm, report=report or (lambda text: None), activity=activity)
    # 3. wait for all ranks; from now on messages name a rank by island and host
    facts = [environment.host, os.getpid(), visible_list(environ)]
    found = control.all_gather("start", facts, START_SECONDS)
    hosts, pids, lists = zip(*found, strict=True)
    control.names = [rank_name(placement, host) for placement, host in zip(placements, hosts, strict=True)]
    unlink_shared_memory()
    placement = placements[environment.rank]
    # 4. the devices of this process, now that it is known what the others of its host see
    here = [rank for rank, host in enumerate(hosts) if host == environment.host]
    local = replace(environment, local_rank=here.index(environment.rank), local_size=len(here))
    bind_devices(local, environ, [lists[rank] for rank in here])
    # 5. one JAX runtime for each island
    join_processes(placement, comm, environment.host)
    first_ranks = tuple(rank for rank, other in enumerate(placements) if other.process == 0)
    return Islands(
        placement=placement,
        environment=environment,
        control=control,
        comm=comm,
        first_ranks=first_ranks,
        pids=pids,
        hosts=hosts,
    )


def unlink_shared_memory(maps: Path = Path("/proc/self/maps")) -> None:
    """Unlink the memory that MPICH shares on a host, once every rank has mapped it.

    The memory exists until the last rank ends. Without the unlink, killed ranks would leave it for ever.
    """
    if not maps.exists():
        return
    for path in set(re.findall(r"/dev/shm/mpich_shm_\w+$", maps.read_text(), re.MULTILINE)):
        Path(path).unlink(missing_ok=True)


def make_watchdog(watch: Watch, activity: ActivityRecord, stacks: Path, islands: Islands | None) -> Watchdog:
    """Make the watchdog of this process; a collective call of all ranks.

    Args:
      watch: the limits.
      activity: the activity record of this process.
      stacks: the file for stacks.
      islands: the islands; None for a single process.
    """
    if islands is None:
        host = socket.gethostname()
        return Watchdog(watch, activity, stacks, [Peer(f"the run on host {host}", host, os.getpid())])
    from shardtrain.islands.bridge import HeartbeatChannel

    peers = [Peer(*each) for each in zip(islands.control.names, islands.hosts, islands.pids, strict=True)]
    return Watchdog(watch, activity, stacks, peers, HeartbeatChannel(islands.comm))


def rank_name(placement: RankPlacement, host: str) -> str:
    """Return the name of a rank in messages.

    >>> rank_name(RankPlacement(island=1, num_islands=2, process=0, num_processes=1), "b")
    'island 1 (host b)'
    >>> rank_name(RankPlacement(island=1, num_islands=2, process=3, num_processes=4), "b")
    'island 1.3 (host b)'
    """
    return f"island {placement.name} (host {host})"


def format_other_mpi(environment: RankEnvironment, rank: int, size: int) -> str:
    """Format the message for a launcher and an mpi4py that belong to different MPIs.

    >>> numbers = {"rank": 1, "size": 4, "local_rank": 1, "local_size": 4}
    >>> format_other_mpi(RankEnvironment(launcher="openmpi", host="a", **numbers), 0, 1)[:64]
    'the launcher (openmpi) says rank 1 of 4, but MPI says rank 0 of '
    """
    return (
        f"the launcher ({environment.launcher}) says rank {environment.rank} of {environment.size}, but MPI"
        f" says rank {rank} of {size}: mpi4py and the launcher belong to different MPIs. Use the mpiexec"
        " installed beside this Python, or install mpi4py and mpi4jax for the launcher's MPI (README,"
        " Installing); srun needs --mpi=pmi2 or --mpi=pmix"
    )


def binding(islands: Islands) -> list[dict[str, Any]]:
    """Gather island, host, pid, devices and cores of each rank, for the table shown at the start."""
    devices = jax.local_devices()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    mine = {
        "rank": islands.environment.rank,
        "island": islands.placement.island,
        "process": islands.placement.process,
        "host": islands.environment.host,
        "pid": os.getpid(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "ids": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "cores": cores,
    }
    return islands.control.all_gather("binding", mine)
