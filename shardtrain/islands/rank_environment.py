"""Find the rank of this process under any launcher, from environment variables. No jax, no MPI.

The variables are in `launcher_variables.py`, the rank's island in `rank_placement.py`, its share of GPUs and
cores of the host in `binding.py`.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from shardtrain.islands.launcher_variables import (
    HOST,
    LAUNCHERS,
    PMI,
    RANK_WITHOUT_SIZE,
    LauncherVariables,
)
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_data import parse_count

MOST_NODES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """The rank of this process, as its launcher set it.

    Args:
      launcher: a key of `LAUNCHERS`: "openmpi", "hydra" (MPICH and Intel MPI), "srun", ...; or "none".
      rank: the rank of this process among all that were launched.
      size: number of processes that were launched.
      local_rank: rank among the processes on this host; None if the launcher sets none, so that MPI must
        find it.
      local_size: number of processes on this host; None if the launcher sets none.
      host: the name of the host.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    host: str


def find_rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Find the rank of this process in the variables that launchers set.

    An mpiexec inside a Slurm job starts its helpers by srun, and their SLURM_PROCID reaches the ranks.
    Therefore the variables of MPI launchers take precedence over those of srun. A batch script has a
    SLURM_PROCID too, but is a rank only inside a step (SLURM_STEP_ID).

    Args:
      environ: the environment of the process.

    Returns:
      The rank; rank 0 of 1 and launcher "none" without a launcher.

    Raises:
      ValueError: a variable is not a number, a rank is not below its size, or a launcher sets a rank and no
        size, so that every process would run as if it were the only one.

    >>> local = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    >>> found = find_rank_environment({"PMI_RANK": "1", "PMI_SIZE": "2", **local})
    >>> found.launcher, found.rank, found.size, found.local_rank
    ('hydra', 1, 2, 1)
    """
    host = environ.get(HOST) or socket.gethostname()
    for launcher, variables in LAUNCHERS.items():
        if not _is_started_by(variables, environ):
            continue
        rank = _read_number(environ, variables.rank)
        size = _read_number(environ, _size_variable(variables, environ))
        if not 0 <= rank < size:
            raise ValueError(f"launcher {launcher} gave rank {rank} of {size}; a rank is 0 to {size - 1}")
        local_rank, local_size = _find_local_rank(variables, environ, size)
        return RankEnvironment(
            launcher=launcher, rank=rank, size=size, local_rank=local_rank, local_size=local_size, host=host
        )
    if RANK_WITHOUT_SIZE in environ:
        raise ValueError(
            f"the launcher sets rank {environ[RANK_WITHOUT_SIZE]} ({RANK_WITHOUT_SIZE}) and no number of"
            " ranks; start with mpiexec or mpirun of MPICH, Open MPI or Intel MPI, or with srun or flux run,"
            f" or set {PMI.rank} and {PMI.size[0]} for each rank"
        )
    return RankEnvironment(launcher="none", rank=0, size=1, local_rank=0, local_size=1, host=host)


def _is_started_by(variables: LauncherVariables, environ: Mapping[str, str]) -> bool:
    size = _size_variable(variables, environ)
    if not {variables.rank, size, *variables.marker} <= environ.keys():
        return False
    if not variables.over_pmi:
        return True
    # srun --mpi=pmi2 and flux set PMI_* to the same; where they differ, an mpiexec was started by it
    pmi = environ.get(PMI.rank), environ.get(PMI.size[0])
    return pmi in ((None, None), (environ[variables.rank], environ[size]))


def _size_variable(variables: LauncherVariables, environ: Mapping[str, str]) -> str:
    return next((name for name in variables.size if name in environ), variables.size[0])


def _find_local_rank(
    variables: LauncherVariables, environ: Mapping[str, str], size: int
) -> tuple[int | None, int | None]:
    """Return (rank on this host, number of ranks on it); both None if the launcher does not set them."""
    if size == 1:
        return 0, 1
    if variables.local_rank is None or variables.local_rank not in environ:
        return None, None
    rank = _read_number(environ, variables.local_rank)
    if variables.local_size is not None:
        local_size = _read_number(environ, variables.local_size)
        # this rank would have no GPU and no core
        if not rank < local_size <= size:
            raise ValueError(
                f"{variables.local_rank} is {rank} and {variables.local_size} is {local_size}, of {size}"
                " ranks; a launcher sets a rank on this host below the number of ranks there"
            )
        return rank, local_size
    if variables.num_nodes is not None and variables.num_nodes in environ:
        # tasks may be shared unevenly by nodes: only these two are certain
        num_nodes = _read_number(environ, variables.num_nodes)
        certain = {1: size, size: 1}.get(num_nodes, 0)
        return (rank, certain) if rank < certain else (None, None)
    if variables.ranks_here is not None and (here := environ.get(variables.ranks_here)):
        ranks = here.split(",")
        if environ[variables.rank] in ranks and rank < len(ranks):
            return rank, len(ranks)
    # in a heterogeneous job Slurm lists the hosts by name, and numbers them by component
    one_component = variables.components is None or variables.components not in environ
    if variables.tasks_per_node is not None and variables.node is not None and one_component:
        counts = parse_tasks_per_node(environ.get(variables.tasks_per_node, ""))
        number = parse_count(environ.get(variables.node, ""))
        if number is not None and number < len(counts) and rank < counts[number]:
            return rank, counts[number]
    return None, None


def _read_number(environ: Mapping[str, str], name: str) -> int:
    number = parse_count(environ[name])
    if number is None:
        raise ValueError(f"the variable {name} is {short(environ[name])}; a launcher sets a number there")
    return number


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's short form; [] if it cannot be parsed.

    >>> parse_tasks_per_node("2(x3),1"), parse_tasks_per_node("1(x99999999999)")
    ([2, 2, 2, 1], [])
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if not found:
            return []
        if len(counts) + int(found[2] or 1) > MOST_NODES:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
