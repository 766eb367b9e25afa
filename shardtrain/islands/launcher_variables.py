"""List the environment variables that launchers and batch systems set.

Rank discovery, the doctor and `launch` read this list; a new launcher with other variables is one more entry.
`rank_environment.py` interprets the values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LauncherVariables:
    """The variables of one launcher.

    A process counts as a rank of this launcher if `rank`, one of `size` and everything in `marker` are set.

    Args:
      rank: variable of the rank among all.
      size: variables of the number of ranks; the first one that is set counts.
      local_rank: variable of the rank among those on the same host; None if the launcher sets none.
      local_size: variable of the number of ranks on this host; None if the launcher sets none.
      num_nodes: variable of the number of hosts.
      node: variable of the index of this host.
      tasks_per_node: variable of the number of ranks of each host, in Slurm's short form: 2(x3),1.
      ranks_here: variable of the ranks of this host: 2,3. It takes precedence over `tasks_per_node`.
      components: variable that is set if a launch has hosts of several components; `node` then has another
        order of hosts than `tasks_per_node`.
      marker: further variables that must be set, because a batch script may have the rank variable too.
      gpu_binding: variables that are set, and not "none", if the launcher bound GPUs to each rank.
      cpu_binding: such a variable for cores; None compares the cores of the process with those of the host.
      mpi_vendor: the MPI whose library finds its ranks under this launcher; None means any.
      over_pmi: whether it also sets PMI_RANK and PMI_SIZE for its ranks. If these differ from its own, an
        mpiexec that it started has launched the ranks.
    """

    rank: str
    size: tuple[str, ...]
    local_rank: str | None = None
    local_size: str | None = None
    num_nodes: str | None = None
    node: str | None = None
    tasks_per_node: str | None = None
    ranks_here: str | None = None
    components: str | None = None
    marker: tuple[str, ...] = ()
    gpu_binding: tuple[str, ...] = ()
    cpu_binding: str | None = None
    mpi_vendor: Literal["openmpi", "hydra"] | None = None
    over_pmi: bool = False


PMI = LauncherVariables(rank="PMI_RANK", size=("PMI_SIZE",), mpi_vendor="hydra")

LAUNCHERS: Mapping[str, LauncherVariables] = {
    "openmpi": LauncherVariables(
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        marker=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        mpi_vendor="openmpi",
    ),
    "mvapich": LauncherVariables(
        rank="MV2_COMM_WORLD_RANK",
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        marker=("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        mpi_vendor="hydra",
    ),
    # MPICH and Intel MPI
    "hydra": replace(
        PMI,
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        marker=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ),
    # Cray's
    "pals": replace(
        PMI,
        local_rank="PMI_LOCAL_RANK",
        local_size="PMI_LOCAL_SIZE",
        marker=("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ),
    # flux-environment(7). No variable holds the number of tasks on this node.
    "flux": LauncherVariables(
        rank="FLUX_TASK_RANK",
        size=("FLUX_JOB_SIZE",),
        local_rank="FLUX_TASK_LOCAL_ID",
        num_nodes="FLUX_JOB_NNODES",
        over_pmi=True,
    ),
    "srun": LauncherVariables(
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        node="SLURM_NODEID",
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        ranks_here="SLURM_GTIDS",
        components="SLURM_HET_SIZE",
        # a batch script has a SLURM_PROCID too, and is no rank
        marker=("SLURM_STEP_ID",),
        gpu_binding=("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK"),
        cpu_binding="SLURM_CPU_BIND_TYPE",
        over_pmi=True,
    ),
    # plain PMI sets no local rank: it has to be found over MPI
    "pmi": PMI,
}
"""Launcher -> its variables. The first launcher whose variables are all set started this process: an mpiexec
inside a batch job comes before the batch system, whose variables its ranks see too."""

HOST = "SLURMD_NODENAME"
"""Variable with the batch system's name of this host; several nodes of Slurm may be one machine."""

RANK_WITHOUT_SIZE = "PMIX_RANK"
"""Variable that every PMIx launcher sets, without one for the number of ranks."""

MPI_TYPE = "SLURM_MPI_TYPE"
"""Variable with the PMI of srun: pmi2, pmix, none."""

JOB_ID, JOB_TASKS = "SLURM_JOB_ID", "SLURM_NTASKS"
"""Variables that a batch script or an allocation has too, which is no rank."""

STEP_GPUS, NODE_GPUS = "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"
"""Variables: indices of the GPUs of this step on this host; number of GPUs of the job on this host."""

OTHER_LAUNCHERS = (
    *("JSM_NAMESPACE_RANK", "ALPS_APP_PE", "MP_CHILD", "OMPI_MCA_orte_ess_vpid"),
    *("PMIX_NAMESPACE", "PMI_FD", "HYDI_CONTROL_FD"),
)
"""Variables of launchers whose ranks shardtrain cannot number (jsrun, aprun, poe, a bare PMI)."""

SET_BY_LAUNCHERS = (
    *("SLURM_", "SLURMD_", "FLUX_TASK_", "FLUX_JOB_", "PBS_", "LSB_", "PE_HOSTFILE"),
    *("PMI_", "PMI2_", "PMIX_", "HYDI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL", "PALS_"),
)
"""Prefixes of variables that only launchers and batch systems set. An mpiexec that sees them would start its
ranks on the hosts of the batch job, or join another launch."""

SETTINGS_TOO = ("PMI", "PMIX", "OMPI_", "PRTE", "MV2_", "HYDRA", "MPI_", "I_MPI", "SHARDTRAIN_ISLAND")
"""Prefixes of variables that launchers set for their ranks, and users set as options of MPI."""


def drop_launch_variables(environ: Mapping[str, str], *, keep_settings: bool) -> dict[str, str]:
    """Return an environment without the variables of the launcher or batch system around this process.

    Args:
      environ: the environment variables of the process.
      keep_settings: whether to keep variables that may be a user's options of MPI: True for a new launch,
        False for a child process that starts MPI without other ranks.

    >>> environ = {"SLURM_JOB_ID": "1", "OMPI_MCA_btl": "tcp", "PATH": "/bin"}
    >>> drop_launch_variables(environ, keep_settings=True)
    {'OMPI_MCA_btl': 'tcp', 'PATH': '/bin'}
    >>> drop_launch_variables(environ, keep_settings=False)
    {'PATH': '/bin'}
    """
    prefixes = SET_BY_LAUNCHERS if keep_settings else (*SET_BY_LAUNCHERS, *SETTINGS_TOO)
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def find_pmi(environ: Mapping[str, str]) -> str:
    """Return the interface by which MPI talks to the launcher: PMIx, PMI-2, PMI or none.

    >>> find_pmi({"PMIX_RANK": "0"}), find_pmi({"PMI_FD": "7", "SLURM_MPI_TYPE": "pmi2"})
    ('PMIx', 'PMI-2')
    >>> find_pmi({"PMI_FD": "7"}), find_pmi({})
    ('PMI', 'none')
    """
    if any(name.startswith("PMIX_") for name in environ):
        return "PMIx"
    if environ.get(MPI_TYPE, "").startswith("pmi2"):
        return "PMI-2"
    return "PMI" if any(name.startswith("PMI") for name in environ) else "none"
