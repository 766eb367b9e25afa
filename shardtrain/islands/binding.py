"""Divide the GPUs and cores of a host among its ranks, before jax starts. No jax, no MPI."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.islands.launcher_variables import LAUNCHERS
from shardtrain.islands.rank_environment import RankEnvironment
from shardtrain.system.host import list_gpu_files, parse_ranges

BIND = "SHARDTRAIN_BIND"
"""Variable: the value `no` leaves devices and cores as the launcher assigned them."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables with the visible devices of a process; the first one that is set counts."""

OWN_IDS = "JAX_LOCAL_DEVICE_IDS"
"""Variable with the user's selection of the visible devices."""

MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def share(things: Sequence, index: int, parts: int) -> list:
    """Return part `index` of `parts` consecutive parts; the first parts get one more item if uneven.

    >>> share("abcde", 0, 2), share("abcde", 1, 2)
    (['a', 'b', 'c'], ['d', 'e'])
    """
    each, more = divmod(len(things), parts)
    start = index * each + min(index, more)
    return list(things[start : start + each + (index < more)])


def divide_devices(num_visible: int, local_rank: int, local_size: int, bound: bool) -> tuple[int, ...]:
    """Return the indices of the devices that a process uses, among those that it sees.

    A process that is the only one, or whose devices are bound to it, uses all of them. Ranks that see the
    same devices use equal parts, in the order of their local ranks; if there are fewer devices than ranks,
    equal numbers of ranks share each device.

    Args:
      num_visible: number of devices that the process sees.
      local_rank: its rank among the processes of the host.
      local_size: number of processes of the host.
      bound: whether no other process of the host uses these devices.

    Raises:
      ValueError: the devices cannot be shared evenly; the message computes numbers that can.

    >>> divide_devices(4, 0, 1, False), divide_devices(4, 1, 2, False), divide_devices(4, 1, 2, True)
    ((0, 1, 2, 3), (2, 3), (0, 1, 2, 3))
    """
    if bound or local_size == 1 or not num_visible:
        return tuple(range(num_visible))
    if num_visible % local_size == 0:
        each = num_visible // local_size
        return tuple(range(local_rank * each, (local_rank + 1) * each))
    if local_size % num_visible == 0:
        return (local_rank % num_visible,)
    lower = num_visible // local_size * local_size
    fewer = f", or make only {lower} of them visible" if lower else ""
    starts = " or ".join(str(n) for n in range(1, num_visible + 1) if num_visible % n == 0)
    raise ValueError(
        f"{local_size} ranks of a host see the same {num_visible} GPUs, which cannot be shared evenly:"
        f" {num_visible} % {local_size} = {num_visible % local_size}. Start {starts} ranks there{fewer}; if"
        f" each rank has GPUs of its own, bind them by the launcher or set {BIND}=no"
    )


def device_environment(
    environment: RankEnvironment,
    environ: Mapping[str, str],
    num_gpus: int | None = None,
    neighbours: Sequence[str | None] | None = None,
) -> dict[str, str]:
    """Return the variables to set before jax starts, so that the ranks on one host share its GPUs.

    No variable is set if jax uses the CPU, if there is no GPU, or if a rank uses all GPUs that it sees: it is
    the only rank, or GPUs are bound to it by the launcher (srun --gpus-per-task, --gpu-bind), by
    SHARDTRAIN_BIND=no, by JAX_LOCAL_DEVICE_IDS, or by different CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES) of the ranks of the host.

    Args:
      environment: the rank environment of this rank; nothing is set if its local rank is None.
      environ: the environment variables, as the launcher set them.
      num_gpus: number of GPUs on this host; None counts them.
      neighbours: the lists of visible devices of all ranks on the host, see `visible_list`. None before MPI
        has started; then no variable that depends on them is set.

    Returns:
      The variable with the devices, and the fraction of memory per process if ranks share a GPU.

    Raises:
      ValueError: ranks see some devices in common, or cannot share the same devices evenly.

    >>> environment = RankEnvironment(launcher="hydra", rank=1, size=2, local_rank=1, local_size=2, host="a")
    >>> device_environment(environment, {}, num_gpus=4)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    rank, size = environment.local_rank, environment.local_size
    if rank is None or size in (None, 1) or environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return {}
    assert size is not None
    variable = _visible_variable(environ)
    text = environ.get(variable)
    gpus = parse_devices(text)
    if text is None:
        gpus = [str(i) for i in range(len(list_gpu_files()) if num_gpus is None else num_gpus)]
    if not gpus or _is_declared_bound(environment, environ):
        return {}
    # before MPI starts it is unknown whether the others see the same: divide only a list for all of them
    if neighbours is None and (len(gpus) % size or (text is not None and len(gpus) < size)):
        return (
            {} if text is not None or size % len(gpus) else _assign_gpus(variable, gpus, rank, size, environ)
        )
    if neighbours is not None and _lists_are_bound(environment.host, neighbours):
        return {}
    return _assign_gpus(variable, gpus, rank, size, environ)


def bind_devices(
    local: RankEnvironment, environ: Mapping[str, str], neighbours: Sequence[str | None]
) -> None:
    """Set the variables of this process's devices before jax starts, in place of earlier ones.

    Args:
      local: its rank environment, with its local rank.
      environ: the environment variables, as the launcher set them.
      neighbours: the lists of visible devices of all ranks on the host, see `visible_list`.

    Raises:
      ValueError: see `device_environment`.
    """
    found = device_environment(local, environ, neighbours=neighbours)
    for name in VISIBLE:
        os.environ.pop(name, None)
    os.environ.update({name: environ[name] for name in VISIBLE if name in environ})
    os.environ.update(found)


def _assign_gpus(
    variable: str, gpus: Sequence[str], rank: int, size: int, environ: Mapping[str, str]
) -> dict[str, str]:
    mine = divide_devices(len(gpus), rank, size, bound=False)
    found = {variable: ",".join(gpus[index] for index in mine)}
    if len(gpus) < size and MEMORY not in environ:
        found[MEMORY] = f"{0.75 / (size // len(gpus)):.3f}"
    return found


def _lists_are_bound(host: str, lists: Sequence[str | None]) -> bool:
    """Return whether each rank of a host sees devices of its own.

    Raises:
      ValueError: the ranks see different devices, and some in common.
    """
    if len(set(lists)) == 1:
        return False
    names = [name for text in lists for name in sorted(set(parse_devices(text)))]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or None in lists:
        shown = "; ".join("all" if text is None else text or "none" for text in lists)
        raise ValueError(
            f"the ranks of host {host} see different GPUs, and some of them twice: {shown}. Give all the"
            " same list, which they then share, or lists without"
            f" {', '.join(twice) or 'one that is unset'} in common; if they are different GPUs of the same"
            f" number, set {BIND}=no"
        )
    return True


def visible_list(environ: Mapping[str, str]) -> str | None:
    """Return the list of devices that a launcher or a user made visible; None means all of the host."""
    return environ.get(_visible_variable(environ))


def runtime_device_ids(environ: Mapping[str, str]) -> list[int] | None:
    """Return the device ids for `jax.distributed.initialize`: the user's selection, or all visible devices.

    Args:
      environ: the environment variables, after `device_environment`.

    Returns:
      None without a list of visible devices: jax then uses all.

    >>> runtime_device_ids({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}), runtime_device_ids({})
    ([0, 1, 2, 3], None)
    >>> runtime_device_ids({"CUDA_VISIBLE_DEVICES": "4,5", "JAX_LOCAL_DEVICE_IDS": "1"})
    [1]
    """
    if own := environ.get(OWN_IDS):
        return [int(word) for word in own.split(",")]
    names = parse_devices(visible_list(environ))
    # CUDA shows a process one part of a GPU, however many are listed
    plain = names and not any(name.startswith("MIG") for name in names)
    return list(range(len(names))) if plain else None


def parse_devices(text: str | None) -> list[str]:
    """Parse a list of visible devices; CUDA ignores all entries after an invalid one.

    >>> parse_devices("0,2"), parse_devices("1,-1,2"), parse_devices(None)
    (['0', '2'], ['1'], [])
    """
    words = [word.strip() for word in (text or "").split(",")]
    end = next((i for i, word in enumerate(words) if word in ("", "-1", "NoDevFiles")), len(words))
    return words[:end]


def _visible_variable(environ: Mapping[str, str]) -> str:
    return next((name for name in VISIBLE if name in environ), VISIBLE[0])


def _is_declared_bound(environment: RankEnvironment, environ: Mapping[str, str]) -> bool:
    names = LAUNCHERS[environment.launcher].gpu_binding if environment.launcher in LAUNCHERS else ()
    by_launcher = any(environ.get(name, "none") != "none" for name in names)
    return by_launcher or environ.get(BIND) == "no" or OWN_IDS in environ


def bind_cpus(
    environment: RankEnvironment, environ: Mapping[str, str] | None = None, usable: set[int] | None = None
) -> set[int] | None:
    """Return the cores for this rank: an even share of those that it may use, by local rank.

    The caller passes the result to `os.sched_setaffinity` before jax starts its threads. Hardware threads of
    a core stay together.

    Args:
      environment: the rank environment of this rank.
      environ: the environment variables; None means those of this process.
      usable: cores of the host or of its container; None reads them.

    Returns:
      None if the rank is the only one on its host, its local rank is unknown, the launcher has bound it,
      there are fewer cores than ranks, or SHARDTRAIN_BIND=no.
    """
    environ = os.environ if environ is None else environ
    if environment.local_rank is None or environment.local_size in (None, 1) or environ.get(BIND) == "no":
        return None
    assert environment.local_size is not None
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = os.sched_getaffinity(0)
    if _cores_are_bound(environment, environ, mine, read_usable_cores() if usable is None else usable):
        return None
    cores = share(sorted(mine, key=_core_sort_key), environment.local_rank, environment.local_size)
    return set(cores) if len(mine) >= environment.local_size else None


def _cores_are_bound(
    environment: RankEnvironment, environ: Mapping[str, str], mine: set[int], usable: set[int]
) -> bool:
    name = LAUNCHERS[environment.launcher].cpu_binding if environment.launcher in LAUNCHERS else None
    if name is not None:
        return environ.get(name, "none") not in ("", "none")
    return mine < usable


def read_usable_cores() -> set[int]:
    """Read the cores that container and batch system allow; the launcher has bound a rank with fewer."""
    every = set(range(os.cpu_count() or 1))
    try:
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].partition("::")[2]
        text = Path(f"/sys/fs/cgroup{group}/cpuset.cpus.effective").read_text().strip()
    except OSError:
        return every
    return set(parse_ranges(text)) or every


def _core_sort_key(cpu: int) -> tuple[int, int, int]:
    """Return a sort key of a CPU that keeps the hardware threads of a core together."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, cpu, cpu
    return package, core, cpu
