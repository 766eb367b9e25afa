"""Where this process stands: its rank under any MPI launcher, its seat in an island, its share of the host.

Reads the environment alone: no jax and no MPI, so that devices and cores can be shared out before either
starts. What the ranks tell each other is in `bridge.py`.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROCESSES = "SHARDTRAIN_ISLAND_PROCESSES"
"""The variable that says how many processes each island has: `1`, or one number an island, `1,3`."""

BIND = "SHARDTRAIN_BIND"
"""`no`: leave devices and cores as the launcher gave them."""


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """What a launcher told this process.

    Args:
      launcher: "openmpi", "hydra" (MPICH and Intel MPI), "mvapich", "pals", "srun", "pmi", or "none".
      rank: of this process among all that were launched.
      size: how many were launched.
      local_rank: among those on this host; None where the launcher does not say it, and several may be
        there: then it has to be found over MPI.
      local_size: how many are on this host; None likewise.
      host: the name of the host.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    host: str


LAUNCHERS: Mapping[str, tuple[str, str, str, str]] = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "pals": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
}
"""Launcher -> its variables of rank, size, local rank and local size, all four of them always set."""


def find_rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Where this process stands, by the variables that launchers set.

    mpiexec inside a Slurm job starts its own helpers by srun, whose SLURM_PROCID reaches the ranks: so the
    variables of an MPI launcher go before those of srun. And a batch script has a SLURM_PROCID too, but is
    one process: only inside a step (SLURM_STEP_ID) is it a rank.

    Args:
      environ: the environment of the process.

    Returns:
      Its place; rank 0 of 1, launcher "none", where nothing launched it. The local rank is None where the
      launcher does not tell it (plain PMI), to be found over MPI.

    Raises:
      ValueError: a variable is not a number, or the rank is not below the size; or a launcher tells a rank
        and no size, so that every process would take itself for the only one.

    >>> local = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    >>> place = find_rank_environment({"PMI_RANK": "1", "PMI_SIZE": "2", **local})
    >>> place.launcher, place.rank, place.size, place.local_rank
    ('hydra', 1, 2, 1)
    """
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    for launcher, names in LAUNCHERS.items():
        if all(name in environ for name in names):
            return _place(launcher, host, *(_number(environ, name) for name in names))
    if _is_srun_task(environ):
        size = _number(environ, _srun_size(environ))
        local = _srun_local(environ, size)
        return _place("srun", host, _number(environ, "SLURM_PROCID"), size, *local)
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
        return _place("pmi", host, rank, size, *((0, 1) if size == 1 else (None, None)))
    if "PMIX_RANK" in environ:
        raise ValueError(
            f"the launcher says that this is rank {environ['PMIX_RANK']} (PMIX_RANK), and not of how many;"
            " start with mpiexec or mpirun of MPICH, Open MPI or Intel MPI, or with srun, or set PMI_RANK"
            " and PMI_SIZE for each rank"
        )
    return _place("none", host, 0, 1, 0, 1)


def _place(
    launcher: str, host: str, rank: int, size: int, local_rank: int | None, local_size: int | None
) -> RankEnvironment:
    if not 0 <= rank < size:
        raise ValueError(f"launcher {launcher} gave rank {rank} of {size}; a rank is 0 to {size - 1}")
    return RankEnvironment(
        launcher=launcher, rank=rank, size=size, local_rank=local_rank, local_size=local_size, host=host
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ValueError(f"the variable {name} is {environ[name]!r}; a launcher sets a number there")
    return int(environ[name])


def _srun_size(environ: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    if not {"SLURM_STEP_ID", "SLURM_PROCID", _srun_size(environ)} <= environ.keys():
        return False
    # srun --mpi=pmi2 sets PMI_* to the same; where they differ, an mpiexec stands between
    told = environ.get("PMI_RANK"), environ.get("PMI_SIZE")
    return told in ((None, None), (environ["SLURM_PROCID"], environ[_srun_size(environ)]))


def _srun_local(environ: Mapping[str, str], size: int) -> tuple[int | None, int | None]:
    if size == 1:
        return 0, 1
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    if "SLURM_LOCALID" not in environ or not node.isdecimal() or int(node) >= len(counts):
        return None, None
    return _number(environ, "SLURM_LOCALID"), counts[int(node)]


def tasks_per_node(text: str) -> list[int]:
    """The count of each node, from Slurm's short form; [] where it is not understood.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Which island a rank belongs to, and which process of it it is.

    Args:
      island: from 0.
      num_islands: how many there are.
      process: within the island, from 0.
      num_processes: how many this island has.
    """

    island: int
    num_islands: int
    process: int
    num_processes: int


def parse_processes(text: str) -> int | tuple[int, ...]:
    """Read `SHARDTRAIN_ISLAND_PROCESSES`: one number for all islands, or one each.

    Raises:
      ValueError: something in it is not a number from 1.

    >>> parse_processes("2"), parse_processes("1,3")
    (2, (1, 3))
    """
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not word.isdecimal() or int(word) < 1]:
        raise ValueError(
            f"processes per island {text!r}: {', '.join(map(repr, wrong))} is no number from 1;"
            " write one for all islands, 2, or one each, 1,3"
        )
    numbers = [int(word) for word in words]
    return tuple(numbers) if len(numbers) > 1 else numbers[0]


def find_seat(rank: int, size: int, processes: Sequence[int] | int = 1) -> Seat:
    """The seat of a rank: ranks in order fill the islands.

    Args:
      rank: 0 to size - 1.
      size: how many ranks there are.
      processes: of each island: one number for all, or one each.

    Raises:
      ValueError: the ranks do not fill the islands exactly; the message computes what would.

    >>> find_seat(2, 4, [1, 3])
    Seat(island=1, num_islands=2, process=1, num_processes=3)
    """
    assert 0 <= rank < size, (rank, size)
    if problem := seat_problem(size, processes):
        raise ValueError(problem)
    each = [processes] * (size // processes) if isinstance(processes, int) else list(processes)
    first = 0
    for island, number in enumerate(each):
        if rank < first + number:
            return Seat(island=island, num_islands=len(each), process=rank - first, num_processes=number)
        first += number
    raise AssertionError("the ranks fill the islands")


def seat_problem(size: int, processes: Sequence[int] | int) -> str | None:
    """Why so many ranks cannot fill such islands; None where they do.

    >>> seat_problem(6, 4)
    '6 ranks cannot fill islands of 4 processes: 6 % 4 = 2. Start 4 or 8 ranks, or give islands 6, 3, 2 or 1'
    >>> seat_problem(5, [1, 3])
    'islands of 1,3 processes need 4 ranks, and there are 5. Start 4 ranks, or give the last 4: 1,4'
    """
    numbers = [processes] if isinstance(processes, int) else list(processes)
    if not numbers or min(numbers) < 1:
        return f"islands of {processes} processes: each needs 1 or more; write one number, or one each: 1,3"
    if isinstance(processes, int):
        if size % processes == 0:
            return None
        lower = size // processes * processes
        starts = " or ".join(str(n) for n in (lower, lower + processes) if n)
        divisors = [str(n) for n in range(size, 0, -1) if size % n == 0]
        return (
            f"{size} ranks cannot fill islands of {processes} processes: {size} % {processes} ="
            f" {size % processes}. Start {starts} ranks, or give islands {_any_of(divisors)}"
        )
    if sum(numbers) == size:
        return None
    text, last = ",".join(map(str, numbers)), size - sum(numbers[:-1])
    fix = f", or give the last {last}: {','.join(map(str, [*numbers[:-1], last]))}" if last > 0 else ""
    return (
        f"islands of {text} processes need {sum(numbers)} ranks, and there are {size}."
        f" Start {sum(numbers)} ranks{fix}"
    )


def _any_of(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def share(things: Sequence, index: int, parts: int) -> list:
    """Part `index` of `parts`, in order; the first parts get one more where it does not divide.

    >>> share("abcde", 0, 2), share("abcde", 1, 2)
    (['a', 'b', 'c'], ['d', 'e'])
    """
    each, more = divmod(len(things), parts)
    start = index * each + min(index, more)
    return list(things[start : start + each + (index < more)])


def device_environment(
    place: RankEnvironment, environ: Mapping[str, str], num_gpus: int | None = None
) -> dict[str, str]:
    """The variables to set before jax starts, so that the ranks on one host share its GPUs.

    Nothing where there is one rank or no GPU, jax shall use the CPU, the launcher has bound GPUs to each
    rank (srun --gpus-per-task, --gpu-bind; fewer visible than ranks), or SHARDTRAIN_BIND=no. A launcher
    that binds several GPUs to each of several ranks by another way needs that last one. With fewer GPUs
    than ranks, ranks share one, and its memory.

    Args:
      place: of this rank; its local rank must be known, or nothing is done.
      environ: the environment.
      num_gpus: on this host; None counts them.

    Returns:
      CUDA_VISIBLE_DEVICES, and the share of memory where GPUs are shared.

    >>> place = RankEnvironment(launcher="hydra", rank=1, size=2, local_rank=1, local_size=2, host="a")
    >>> device_environment(place, {}, num_gpus=4)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    if place.local_rank is None or place.local_size in (None, 1) or environ.get(BIND) == "no":
        return {}
    if environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu" or _gpus_bound_by_slurm(place, environ):
        return {}
    assert place.local_size is not None
    told = environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        gpus = [str(i) for i in range(_count_gpus() if num_gpus is None else num_gpus)]
    else:
        gpus = [name for name in told.split(",") if name]
        if len(gpus) < place.local_size:
            return {}
    if not gpus:
        return {}
    if len(gpus) >= place.local_size:
        return {"CUDA_VISIBLE_DEVICES": ",".join(share(gpus, place.local_rank, place.local_size))}
    sharing = -(-place.local_size // len(gpus))
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.75 / sharing:.3f}"}
    return {"CUDA_VISIBLE_DEVICES": gpus[place.local_rank % len(gpus)]} | {
        name: value for name, value in memory.items() if name not in environ
    }


def _gpus_bound_by_slurm(place: RankEnvironment, environ: Mapping[str, str]) -> bool:
    names = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")
    return place.launcher == "srun" and any(environ.get(name, "none") != "none" for name in names)


def _count_gpus() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))


def bind_cpus(
    place: RankEnvironment, environ: Mapping[str, str] | None = None, usable: set[int] | None = None
) -> set[int] | None:
    """The cores that this rank should keep to: an even share, by local rank, of those it may use.

    It sets nothing: `os.sched_setaffinity(0, cores)`, before jax starts its threads, does. Hardware threads
    of a core stay together.

    Args:
      place: of this rank.
      environ: the environment; None: of this process.
      usable: cores of the host or of its container; None asks the system.

    Returns:
      None where the rank is alone on its host, its local rank is not known, the launcher has bound it, there
      are fewer cores than ranks, or SHARDTRAIN_BIND=no.
    """
    environ = os.environ if environ is None else environ
    if place.local_rank is None or place.local_size in (None, 1) or environ.get(BIND) == "no":
        return None
    assert place.local_size is not None
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = os.sched_getaffinity(0)
    if _cores_are_bound(place, environ, mine, _usable() if usable is None else usable):
        return None
    cores = share(sorted(mine, key=_core), place.local_rank, place.local_size)
    return set(cores) if len(mine) >= place.local_size else None


def _cores_are_bound(
    place: RankEnvironment, environ: Mapping[str, str], mine: set[int], usable: set[int]
) -> bool:
    if place.launcher == "srun":
        return environ.get("SLURM_CPU_BIND_TYPE", "none") not in ("", "none")
    return mine < usable


def _usable() -> set[int]:
    """What the container or the batch system allows; a rank with fewer was bound by somebody."""
    every = set(range(os.cpu_count() or 1))
    try:
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].partition("::")[2]
        text = Path(f"/sys/fs/cgroup{group}/cpuset.cpus.effective").read_text().strip()
    except OSError:
        return every
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {i for low, _, high in ranges for i in range(int(low), int(high or low) + 1)} or every


def _core(cpu: int) -> tuple[int, int, int]:
    """Sorts hardware threads by package and core."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, cpu, cpu
    return package, core, cpu
