"""All launchers of `shardtrain launch`, by name. To add one: CONTRIBUTING, "A launcher"."""

from collections.abc import Mapping

from shardtrain.launch import flux, local, mpi, slurm
from shardtrain.launch.launcher import Launcher

LAUNCHERS: Mapping[str, Launcher] = {
    "local": local.LAUNCHER,
    "mpi": mpi.LAUNCHER,
    "slurm": slurm.LAUNCHER,
    "flux": flux.LAUNCHER,
}
"""Name on the command line -> launcher."""

DEFAULT, WITH_HOSTS = "local", "mpi"
"""The launcher if none is named: without hosts, and with hosts."""
