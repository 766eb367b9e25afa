"""The vendor of an MPI library, and whether a launcher fits it. Texts only: no MPI, no jax."""

import re
from collections.abc import Mapping

from shardtrain.doctor.child import tell
from shardtrain.islands.launcher_variables import LAUNCHERS
from shardtrain.islands.mpi_library import library_environment
from shardtrain.islands.rank_environment import RankEnvironment

LIBRARY_SECONDS = 60.0


def vendor(library: str) -> str:
    """Return the vendor of a library: a value of `launch.mpi.Mpiexec.vendor`, or "other".

    >>> vendor("Open MPI v5.0.3, package: Open MPI"), vendor("MPICH Version: 5.0.2"), vendor("?")
    ('openmpi', 'hydra', 'other')
    """
    if "Open MPI" in library:
        return "openmpi"
    if "Intel(R) MPI" in library:
        return "intel"
    return "hydra" if re.search(r"MPICH|MVAPICH", library) else "other"


def fit(launcher: str, library: str) -> bool:
    """Return whether ranks with this vendor's library find each other under that vendor's mpiexec.

    MPICH's and Intel's speak the same PMI; of a library that is not known nothing can be said.

    >>> fit("hydra", "intel"), fit("openmpi", "hydra")
    (True, False)
    """
    return library == "other" or (launcher == "openmpi") == (library == "openmpi")


def launch_problem(environment: RankEnvironment, environ: Mapping[str, str]) -> str | None:
    """Return why MPI would not start in this rank, or not find the others; None if it should work.

    The library is asked in a child that no launcher started: in a rank of another MPI it may end the process.
    """
    program = "import json; from mpi4py import MPI; print(json.dumps({'library': MPI.Get_library_version()}))"
    facts = tell(program, {**environ, **library_environment(environ)}, LIBRARY_SECONDS)
    if "library" not in facts:
        return f"mpi4py does not start: {facts['died']}"
    # srun and flux start the ranks of any MPI
    launcher = LAUNCHERS[environment.launcher].mpi_vendor
    if launcher is None or fit(launcher, vendor(facts["library"])):
        return None
    version = facts["library"].splitlines()[0]
    return (
        f"the ranks were started by {environment.launcher}, and mpi4py belongs to another MPI"
        f" ({version.strip()}): it"
        f" would not start, or each of {environment.size} ranks would be alone"
    )
