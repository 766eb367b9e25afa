"""Whether a launcher is compatible with an MPI library. No MPI, no jax."""

from collections.abc import Mapping

from shardtrain.doctor.child import run_child
from shardtrain.islands.launcher_variables import LAUNCHERS
from shardtrain.islands.mpi_library import library_environment, vendor
from shardtrain.islands.rank_environment import RankEnvironment

LIBRARY_SECONDS = 60.0


def compatible(launcher: str, library: str) -> bool:
    """Return whether a launcher of one vendor can start ranks that use a library of another.

    MPICH and Intel MPI use the same PMI. An unknown library counts as compatible.

    >>> compatible("hydra", "intel"), compatible("openmpi", "hydra")
    (True, False)
    """
    return library == "other" or (launcher == "openmpi") == (library == "openmpi")


def launch_problem(environment: RankEnvironment, environ: Mapping[str, str]) -> str | None:
    """Return why MPI would not start or not find the other ranks; None if it should work.

    A child process without launcher variables loads mpi4py: a rank of another MPI might end by it.
    """
    program = "import json; from mpi4py import MPI; print(json.dumps({'library': MPI.Get_library_version()}))"
    facts = run_child(program, {**environ, **library_environment(environ)}, LIBRARY_SECONDS)
    if "library" not in facts:
        return f"mpi4py does not start: {facts['died']}"
    # srun and flux start the ranks of any MPI
    launcher = LAUNCHERS[environment.launcher].mpi_vendor
    if launcher is None or compatible(launcher, vendor(facts["library"])):
        return None
    version = facts["library"].splitlines()[0]
    return (
        f"the ranks were started by {environment.launcher}, and mpi4py belongs to another MPI"
        f" ({version.strip()}): it"
        f" would not start, or each of {environment.size} ranks would be alone"
    )
