"""`launch mpi`: start a job by the mpiexec of MPICH, Intel MPI or Open MPI.

MPICH and Intel MPI share the options of Hydra, Open MPI has its own. `local.py` does the same without hosts.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardtrain.islands.mpi_library import find_vendor
from shardtrain.launch.hosts import Host, parse_hosts, place_ranks, read_hostfile
from shardtrain.launch.job import Job
from shardtrain.launch.launcher import Launch, Launcher
from shardtrain.launch.restarts import Restarts

CARRIED = ("JAX_", "XLA_", "SHARDTRAIN_", "MPI4JAX_", "NCCL_", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Prefixes of the variables that Open MPI passes to other hosts only if its command line names them."""

STOP_OPTION = ("--usr1", "INT")
"""Ranks treat SIGUSR1 as Ctrl-C, because it is the only signal that every mpiexec forwards without ending."""


@dataclass(frozen=True, kw_only=True)
class MpiOptions:
    """Options of local and mpi.

    Args:
      restarts: largest number of restarts after a crash or a hang; there is no restart if the same step
        fails twice in a row.
      backoff: seconds before the first restart; each later restart waits twice as long, up to a minute.
      hosts: names of the hosts, in the order of the islands, such as a,b,c; or with the number of ranks of
        each: a:1,b:3.
      hostfile: a file with the hosts, one per line: a, or a:2, or a slots=2.
      mpiexec: path of the mpiexec; by default that of this Python's environment, else the first on PATH.
    """

    restarts: int = 0
    backoff: float = 1.0
    hosts: str | None = None
    hostfile: Path | None = None
    mpiexec: str | None = None


def read_hosts(options: MpiOptions) -> tuple[Host, ...]:
    """Return the hosts that the options name; () without any.

    Raises:
      FileNotFoundError: there is no such hostfile.
      ValueError: hosts and hostfile are both given, or cannot be parsed.
    """
    if options.hosts is not None and options.hostfile is not None:
        raise ValueError("--hosts and --hostfile are both given; use one of them")
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    return parse_hosts(options.hosts) if options.hosts is not None else ()


def read_restarts(options: MpiOptions) -> Restarts:
    """Return the restarts of a run that fails.

    Raises:
      ValueError: a number is out of range.
    """
    return Restarts(most=options.restarts, backoff_seconds=options.backoff)


@dataclass(frozen=True, kw_only=True)
class Mpiexec:
    """An mpiexec and its MPI.

    Args:
      path: the path of the program.
      vendor: "hydra" (MPICH), "intel" or "openmpi".
      version: its version, as it prints it.
    """

    path: str
    vendor: str
    version: str


def find_mpiexec(given: str | None = None) -> Mpiexec:
    """Find the mpiexec: the one given, else that of this Python's environment, else the first on PATH.

    It must belong to the MPI for which mpi4py and mpi4jax were built.

    Raises:
      ValueError: there is none, it does not run, or it belongs to no known MPI.
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
    """Identify an mpiexec by the output of `--version`.

    Raises:
      ValueError: it belongs to no known MPI.

    >>> read_version("mpiexec", "mpiexec (Open MPI) 5.0.11").vendor
    'openmpi'
    """
    if (vendor := find_vendor(text)) != "other":
        number = re.search(r"\d+\.\d[\w.]*", text)
        return Mpiexec(path=path, vendor=vendor, version=number[0] if number else "?")
    first = text.strip().splitlines()[0] if text.strip() else "nothing"
    raise ValueError(
        f"{path} --version prints {first!r}: neither MPICH, Intel MPI nor Open MPI; name one: --mpiexec PATH,"
        " or start the ranks by your own launcher"
    )


def launch(job: Job, options: MpiOptions, environ: Mapping[str, str]) -> Launch:
    """Return the command that starts a job by an mpiexec.

    Args:
      job: without hosts the mpiexec uses the hosts of the surrounding batch job.
      options: the options that choose the mpiexec.
      environ: the environment variables of this process.

    Raises:
      ValueError: no mpiexec is found.
    """
    return launch_by(job, find_mpiexec(options.mpiexec), environ)


def launch_by(
    job: Job, mpiexec: Mpiexec, environ: Mapping[str, str], *, this_machine: bool = False
) -> Launch:
    """Return the command by which a known mpiexec starts a job.

    Args:
      job: without hosts the mpiexec uses the hosts of the surrounding batch job.
      mpiexec: the mpiexec.
      environ: the environment variables of this process.
      this_machine: whether all ranks run on this machine, however few cores it has.
    """
    write = _open_mpi if mpiexec.vendor == "openmpi" else _hydra
    options, files = write(job, mpiexec, environ)
    if this_machine and mpiexec.vendor == "openmpi":
        options.insert(0, ("--oversubscribe",))
    lines = ((mpiexec.path, "-n", str(job.num_ranks)), *options, *job.rank_command(*STOP_OPTION))
    return Launch(lines=lines, environment=_own_environment(mpiexec), files=files)


def _own_environment(mpiexec: Mpiexec) -> dict[str, str]:
    if mpiexec.vendor != "openmpi" or os.geteuid() != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _hydra(job: Job, mpiexec: Mpiexec, environ: Mapping[str, str]) -> tuple[list, dict[Path, str]]:
    options = [("-genv", name, value) for name, value in job.rank_environment(environ).items()]
    # hosts with equal numbers of ranks fit in options; unequal ones need a file
    placed = place_ranks(job.num_ranks, job.hosts) if job.hosts else ()
    counts = {number for _, number in placed}
    if not placed:
        return options, {}
    if len(counts) == 1:
        names = ",".join(name for name, _ in placed)
        return [("-hosts", names, "-ppn", str(counts.pop())), *options], {}
    path = job.logs / "hosts"
    option = "-machinefile" if mpiexec.vendor == "intel" else "-f"
    return [(option, str(path)), *options], {path: "".join(f"{name}:{n}\n" for name, n in placed)}


def _open_mpi(job: Job, mpiexec: Mpiexec, environ: Mapping[str, str]) -> tuple[list, dict[Path, str]]:
    # bound by it, two ranks would have one core each, and the rest of the host would idle
    hosts = ",".join(f"{name}:{n}" for name, n in place_ranks(job.num_ranks, job.hosts)) if job.hosts else ""
    options: list[tuple[str, ...]] = [("--host", hosts)] if hosts else []
    options.append(("--bind-to", "none"))
    own = job.rank_environment(environ)
    options += [("-x", f"{name}={value}") for name, value in own.items()]
    carried = [name for name in sorted(environ) if name.startswith(CARRIED) and name not in own]
    if carried:
        options.append(tuple(word for name in carried for word in ("-x", name)))
    return options, {}


LAUNCHER = Launcher(
    summary="by mpiexec on --hosts, --hostfile, or the hosts of the surrounding batch job",
    options=MpiOptions,
    launch=launch,
    hosts=read_hosts,
    restarts=read_restarts,
)
