"""`launch mpi`: a job as the command line of an mpiexec, whichever MPI it is of.

MPICH and Intel MPI share Hydra's options, Open MPI has its own. `local.py` is the same without hosts.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardtrain.launch.job import Job, Launch, ranks_by_host

CARRIED = ("JAX_", "XLA_", "SHARDTRAIN_", "MPI4JAX_", "NCCL_", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that Open MPI has to be told to take to other hosts, by how they begin."""

STOP_OPTION = ("--usr1", "INT")
"""Ranks take SIGUSR1 for Ctrl-C: the one signal that every mpiexec passes on and does not end at."""


@dataclass(frozen=True, kw_only=True)
class Mpiexec:
    """An mpiexec, and whose it is.

    Args:
      path: of the program.
      flavour: "hydra" (MPICH), "intel" or "openmpi".
      version: as it tells it.
    """

    path: str
    flavour: str
    version: str


def find_mpiexec(given: str | None = None) -> Mpiexec:
    """The mpiexec to use: the one given, else that of this Python's environment, else of PATH.

    MPI libraries do not mix: it must be of the MPI that mpi4py and mpi4jax of this Python were built for.

    Raises:
      ValueError: there is none, it does not run, or it is of no MPI that is known.
    """
    beside = Path(sys.executable).parent
    found = shutil.which(given) if given else None
    if given is None:
        found = shutil.which("mpiexec", path=str(beside)) or shutil.which("mpiexec") or shutil.which("mpirun")
    if found is None:
        what = f"there is no {given!r} that can be run" if given else f"no mpiexec in {beside} or on PATH"
        raise ValueError(
            f"{what}; install shardtrain[mpi], which brings one (README, Installing), or name"
            " it: --mpiexec PATH"
        )
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return read_version(found, done.stdout + done.stderr)


def read_version(path: str, text: str) -> Mpiexec:
    """Whose mpiexec it is, from what `--version` prints.

    Raises:
      ValueError: it is of no MPI that is known.

    >>> read_version("mpiexec", "mpiexec (Open MPI) 5.0.11").flavour
    'openmpi'
    """
    marks = {"intel": "Intel(R) MPI", "hydra": "HYDRA", "openmpi": r"Open ?MPI|OpenRTE|PRRTE|prterun"}
    for flavour, mark in marks.items():
        if re.search(mark if flavour == "openmpi" else re.escape(mark), text):
            number = re.search(r"\d+\.\d[\w.]*", text)
            return Mpiexec(path=path, flavour=flavour, version=number[0] if number else "?")
    first = text.strip().splitlines()[0] if text.strip() else "nothing"
    raise ValueError(
        f"{path} --version prints {first!r}: neither MPICH, Intel MPI nor Open MPI; name one: --mpiexec PATH,"
        " or start the ranks by your own launcher"
    )


def launch(job: Job, mpiexec: Mpiexec, environ: Mapping[str, str], *, here: bool = False) -> Launch:
    """The command that starts a job.

    Args:
      job: without hosts the mpiexec takes those of the batch job around it.
      mpiexec: what starts it.
      environ: of this process.
      here: on this machine alone, however many cores it has.

    Returns:
      What is to be run, and what has to be set and written for it.
    """
    write = _open_mpi if mpiexec.flavour == "openmpi" else _hydra
    options, files = write(job, mpiexec, environ)
    if here and mpiexec.flavour == "openmpi":
        options.insert(0, ("--oversubscribe",))
    lines = ((mpiexec.path, "-n", str(job.num_ranks)), *options, *job.rank_command(*STOP_OPTION))
    return Launch(lines=lines, environment=_own_environment(mpiexec), files=files)


def _own_environment(mpiexec: Mpiexec) -> dict[str, str]:
    if mpiexec.flavour != "openmpi" or os.geteuid() != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _hydra(job: Job, mpiexec: Mpiexec, environ: Mapping[str, str]) -> tuple[list, dict[Path, str]]:
    options = [("-genv", name, value) for name, value in job.rank_environment(environ).items()]
    placed = ranks_by_host(job) if job.hosts else ()
    counts = {number for _, number in placed}
    if not placed:
        return options, {}
    if len(counts) == 1:
        names = ",".join(name for name, _ in placed)
        return [("-hosts", names, "-ppn", str(counts.pop())), *options], {}
    path = job.logs / "hosts"
    option = "-machinefile" if mpiexec.flavour == "intel" else "-f"
    return [(option, str(path)), *options], {path: "".join(f"{name}:{n}\n" for name, n in placed)}


def _open_mpi(job: Job, mpiexec: Mpiexec, environ: Mapping[str, str]) -> tuple[list, dict[Path, str]]:
    # bound by it, two ranks would have one core each, and the rest of the host would idle
    hosts = ",".join(f"{name}:{n}" for name, n in ranks_by_host(job)) if job.hosts else ""
    options: list[tuple[str, ...]] = [("--host", hosts)] if hosts else []
    options.append(("--bind-to", "none"))
    own = job.rank_environment(environ)
    options += [("-x", f"{name}={value}") for name, value in own.items()]
    carried = [name for name in sorted(environ) if name.startswith(CARRIED) and name not in own]
    if carried:
        options.append(tuple(word for name in carried for word in ("-x", name)))
    return options, {}
