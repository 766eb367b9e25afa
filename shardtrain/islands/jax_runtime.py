"""Start one JAX runtime for the processes of an island. Next: `membership.py`."""

import os
import socket
from typing import TYPE_CHECKING, Any

import jax

from shardtrain.islands.binding import runtime_device_ids
from shardtrain.islands.network import exempt_from_proxies, find_listening_address
from shardtrain.islands.rank_placement import RankPlacement

if TYPE_CHECKING:
    from mpi4py import MPI


def join_processes(placement: RankPlacement, comm: "MPI.Comm", host: str) -> None:
    """Start one JAX runtime for an island's processes; the first of them is the coordinator."""
    island = comm.Split(placement.island, placement.process)
    if placement.num_processes > 1:
        mine = find_listening_address(island.allgather(host), os.environ)
        with socket.socket() as free:
            free.bind((mine or "", 0))
            port = free.getsockname()[1]
        # by name: many hosts know their own name by an address of loopback, 127.0.1.1
        address = island.bcast(f"{mine or socket.gethostname()}:{port}", 0)
        # ranks of one run connect without a proxy, which may not know their hosts
        hosts = [*island.allgather(host), address.rpartition(":")[0]]
        os.environ.update(exempt_from_proxies(hosts, os.environ))
        start_runtime(placement, address, mine)
    island.Free()


def start_runtime(placement: RankPlacement, address: str, mine: str | None) -> None:
    """Join this process to its island's JAX runtime.

    Args:
      placement: the island and index of this process.
      address: the address of the first process.
      mine: the address on which this process listens; None means all addresses.
    """
    # else jax takes SIGTERM away from `StopSignals`
    jax.config.update("jax_enable_preemption_service", False)
    if mine is not None:
        _keep_gloo_on(mine)
    jax.distributed.initialize(
        address,
        placement.num_processes,
        placement.process,
        # every GPU that it sees: jax's own detection takes one, by its number on the host, which a process
        # with bound GPUs may not have
        runtime_device_ids(os.environ),
        cluster_detection_method="deactivate",
        coordinator_bind_address=None if mine is None else f"{mine}:{address.rpartition(':')[2]}",
    )


def _keep_gloo_on(address: str) -> None:
    """Make gloo listen on an address; jax has no option for it and uses the address of the host's name."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    private: Any = _jax
    make = private.make_gloo_tcp_collectives
    private.make_gloo_tcp_collectives = lambda **options: make(**{"hostname": address, **options})
