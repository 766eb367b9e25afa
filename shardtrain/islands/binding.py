"""Divide the GPUs and cores of a host among its ranks, before jax starts. No jax, no MPI."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.islands.launcher_variables import LAUNCHERS
from shardtrain.islands.rank_environment import RankEnvironment

BIND = "SHARDTRAIN_BIND"
"""`no`: leave devices and cores as the launcher gave them."""


def share(things: Sequence, index: int, parts: int) -> list:
    """Return part `index` of `parts` consecutive parts; the first get one more if it does not divide.

    >>> share("abcde", 0, 2), share("abcde", 1, 2)
    (['a', 'b', 'c'], ['d', 'e'])
    """
    each, more = divmod(len(things), parts)
    start = index * each + min(index, more)
    return list(things[start : start + each + (index < more)])


def device_environment(
    environment: RankEnvironment, environ: Mapping[str, str], num_gpus: int | None = None
) -> dict[str, str]:
    """Return the variables to set before jax starts, so that the ranks on one host share its GPUs.

    None are set where there is one rank or no GPU, jax is to use the CPU, the launcher has bound GPUs to each
    rank (srun --gpus-per-task, --gpu-bind; fewer visible than ranks), or SHARDTRAIN_BIND=no. A launcher
    that binds several GPUs to each of several ranks by another way needs that last one. With fewer GPUs
    than ranks, ranks share one, and its memory.

    Args:
      environment: the rank environment of this rank; nothing is set if its local rank is None.
      environ: the environment.
      num_gpus: number of GPUs on this host; None counts them.

    Returns:
      CUDA_VISIBLE_DEVICES, and the fraction of memory per process where ranks share a GPU.

    >>> environment = RankEnvironment(launcher="hydra", rank=1, size=2, local_rank=1, local_size=2, host="a")
    >>> device_environment(environment, {}, num_gpus=4)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    if environment.local_rank is None or environment.local_size in (None, 1) or environ.get(BIND) == "no":
        return {}
    if environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu" or _gpus_are_bound(environment, environ):
        return {}
    assert environment.local_size is not None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [str(i) for i in range(_count_gpus() if num_gpus is None else num_gpus)]
    else:
        gpus = [name for name in visible.split(",") if name]
        if len(gpus) < environment.local_size:
            return {}
    if not gpus:
        return {}
    if len(gpus) >= environment.local_size:
        return {"CUDA_VISIBLE_DEVICES": ",".join(share(gpus, environment.local_rank, environment.local_size))}
    sharing = -(-environment.local_size // len(gpus))
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.75 / sharing:.3f}"}
    return {"CUDA_VISIBLE_DEVICES": gpus[environment.local_rank % len(gpus)]} | {
        name: value for name, value in memory.items() if name not in environ
    }


def _gpus_are_bound(environment: RankEnvironment, environ: Mapping[str, str]) -> bool:
    names = LAUNCHERS[environment.launcher].gpu_binding if environment.launcher in LAUNCHERS else ()
    return any(environ.get(name, "none") != "none" for name in names)


def _count_gpus() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))


def bind_cpus(
    environment: RankEnvironment, environ: Mapping[str, str] | None = None, usable: set[int] | None = None
) -> set[int] | None:
    """Return the cores for this rank: an even share, by local rank, of those that it may use.

    Sets nothing: the caller passes the result to `os.sched_setaffinity` before jax starts its threads.
    Hardware threads of a core stay together.

    Args:
      environment: the rank environment of this rank.
      environ: the environment; None: of this process.
      usable: cores of the host or of its container; None asks the system.

    Returns:
      None if the rank is alone on its host, its local rank is not known, the launcher has bound it, there
      are fewer cores than ranks, or SHARDTRAIN_BIND=no.
    """
    environ = os.environ if environ is None else environ
    if environment.local_rank is None or environment.local_size in (None, 1) or environ.get(BIND) == "no":
        return None
    assert environment.local_size is not None
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = os.sched_getaffinity(0)
    if _cores_are_bound(environment, environ, mine, _usable() if usable is None else usable):
        return None
    cores = share(sorted(mine, key=_core), environment.local_rank, environment.local_size)
    return set(cores) if len(mine) >= environment.local_size else None


def _cores_are_bound(
    environment: RankEnvironment, environ: Mapping[str, str], mine: set[int], usable: set[int]
) -> bool:
    name = LAUNCHERS[environment.launcher].cpu_binding if environment.launcher in LAUNCHERS else None
    if name is not None:
        return environ.get(name, "none") not in ("", "none")
    return mine < usable


def _usable() -> set[int]:
    """Return the cores that container and batch system allow; a rank with fewer was bound by its launcher."""
    every = set(range(os.cpu_count() or 1))
    try:
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].partition("::")[2]
        text = Path(f"/sys/fs/cgroup{group}/cpuset.cpus.effective").read_text().strip()
    except OSError:
        return every
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {i for low, _, high in ranges for i in range(int(low), int(high or low) + 1)} or every


def _core(cpu: int) -> tuple[int, int, int]:
    """Return a sort key that keeps the hardware threads of a package and core together."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, cpu, cpu
    return package, core, cpu
