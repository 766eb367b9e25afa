"""The check `binding`: cores, NUMA nodes, threads and limits (cgroups, /dev/shm, ulimits) of each rank."""

import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.doctor.check import (
    Check,
    Facts,
    RankContext,
    RankFacts,
    Row,
    count_text,
    group_by_host,
    join_texts,
)
from shardtrain.report.quantities import bytes_text
from shardtrain.system.cgroup import limits
from shardtrain.system.excerpts import some
from shardtrain.system.host import memory_bytes, parse_ranges, ranges_text
from shardtrain.system.untrusted_data import parse_count

SHM_BYTES_PER_RANK = 64 * 2**20
"""Smallest space in /dev/shm per rank for MPI's buffers; containers often have 64 MiB for all ranks."""

MEMLOCK_BYTES = 2**30
FEW_FILES = 1024
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def collect(context: RankContext) -> Facts:
    """Collect the cores, memory and limits of this rank."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    names = {
        "memlock": resource.RLIMIT_MEMLOCK,
        "nofile": resource.RLIMIT_NOFILE,
        "core": resource.RLIMIT_CORE,
    }
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "cores": cores,
        "given": list(context.given_cores),
        "host_cores": os.cpu_count() or 1,
        "nodes": read_numa_nodes(),
        "threads": {name: context.environ[name] for name in THREADS if name in context.environ},
        "limits": limits(),
        "memory_bytes": memory_bytes("MemTotal"),
        "available_bytes": memory_bytes("MemAvailable"),
        "shm_bytes": shm.f_frsize * shm.f_blocks if shm else None,
        "shm_free_bytes": shm.f_frsize * shm.f_bavail if shm else None,
        "ulimits": {name: _read_soft_limit(kind) for name, kind in names.items()},
        "infiniband": Path("/sys/class/infiniband").is_dir(),
    }


def _read_soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def read_numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> dict[str, list[int]]:
    """Return NUMA node -> its cores; nodes without cores are left out."""
    nodes = {}
    for path in sorted(folder.glob("node[0-9]*/cpulist")):
        if cores := parse_ranges(path.read_text()):
            nodes[path.parent.name.removeprefix("node")] = cores
    return nodes


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for cores, NUMA nodes, limits on cores and memory, /dev/shm and ulimits."""
    hosts = group_by_host(all_facts)
    rows = [
        _check_cores(all_facts, hosts),
        _check_numa(all_facts),
        *_check_threads(all_facts),
        _check_quota(all_facts),
        _check_memory(hosts),
    ]
    return [*rows, _check_shm(hosts), *_check_ulimits(all_facts)]


def _check_cores(all_facts: Sequence[RankFacts], hosts: Mapping[str, Sequence[RankFacts]]) -> Row:
    finding = join_texts((one.name, _cores_text(one.facts)) for one in all_facts)
    for overlapping in (_find_overlap(ranks) for ranks in hosts.values()):
        if overlapping:
            status, text, fix = overlapping
            return Row("cores", f"{text}; {finding}", status, fix)
    return Row("cores", finding)


def _cores_text(facts: Mapping) -> str:
    cores, given, of = (facts[name] for name in ("cores", "given", "host_cores"))
    own = f"{count_text(len(cores), 'core')} ({ranges_text(cores)} of {of})"
    return own if given == cores else f"{own}, its share of {ranges_text(given)}"


def _find_overlap(ranks: Sequence[RankFacts]):
    """Return (status, finding, fix) if several ranks of a host may run on the same cores."""
    users: dict[int, list[str]] = {}
    for one in ranks:
        for core in one.facts["cores"]:
            users.setdefault(core, []).append(one.name)
    shared = [core for core, names in users.items() if len(names) > 1]
    if not shared:
        return None
    host, all_cores = ranks[0].host, ranks[0].facts["host_cores"]
    if len(ranks) > all_cores:
        text = f"{host}: {len(ranks)} ranks share {all_cores} cores"
        return "warning", text, f"start {all_cores} ranks there or fewer: each waits while another computes"
    same = len({tuple(one.facts["cores"]) for one in ranks}) == 1
    if same and len(users) >= len(ranks):
        text = f"{host}: {len(ranks)} ranks run anywhere on the same {len(users)} cores"
        fix = (
            "unset SHARDTRAIN_BIND=no, so that each keeps to a share of its own"
            f" ({len(users) // len(ranks)} cores), or bind by the launcher: srun --cpu-bind=cores"
        )
        return "warning", text, fix
    text = f"{host}: {some(users[shared[0]])} are bound to the same cores {ranges_text(shared)}"
    fix = (
        f"{all_cores} cores are there: bind each rank to its own (mpiexec --bind-to none, then shardtrain"
        f" assigns {all_cores // len(ranks)} to each; srun --cpus-per-task={all_cores // len(ranks)})"
    )
    return "wrong", text, fix


def _check_numa(all_facts: Sequence[RankFacts]) -> Row:
    several = [one for one in all_facts if len(one.facts["nodes"]) > 1]
    if not several:
        return Row("NUMA", "one node on every host")
    on = {
        one.name: [n for n, cores in one.facts["nodes"].items() if set(cores) & set(one.facts["cores"])]
        for one in several
    }
    finding = join_texts((name, f"on node {', '.join(nodes)}") for name, nodes in on.items())
    spread = [one for one in several if len(on[one.name]) > 1]
    if not spread:
        return Row("NUMA", finding)
    one = spread[0]
    num_nodes = len(one.facts["nodes"])
    fix = (
        f"memory of another node is slower: for work on the CPU start {num_nodes} ranks a host, one a node"
        f" (islands={num_nodes}), or numactl --cpunodebind=0 --membind=0"
    )
    return Row("NUMA", f"{finding}: spread over nodes", "note", fix)


def _check_threads(all_facts: Sequence[RankFacts]) -> list[Row]:
    many = [
        (one.name, f"{name}={value} on {len(one.facts['cores'])} cores")
        for one in all_facts
        for name, value in one.facts["threads"].items()
        if (parse_count(value) or 0) > len(one.facts["cores"])
    ]
    if not many:
        return []
    fix = f"unset it, or set it to the cores of a rank: {len(all_facts[0].facts['cores'])}"
    return [Row("threads", join_texts(many), "warning", fix)]


def _check_quota(all_facts: Sequence[RankFacts]) -> Row:
    tight = [one for one in all_facts if 0 < (one.facts["limits"]["cores"] or 0) < len(one.facts["cores"])]
    if not tight:
        return Row("CPU quota", "none below the number of visible cores")
    finding = join_texts(
        (one.name, f"{one.facts['limits']['cores']:g} cores of time, {len(one.facts['cores'])} are visible")
        for one in tight
    )
    num_cores = max(1, int(tight[0].facts["limits"]["cores"]))
    fix = (
        "the kernel stops the threads for a part of every 0.1 s: ask for more (docker --cpus, Slurm"
        f" --cpus-per-task), or bind to {num_cores} cores: taskset -c 0-{num_cores - 1}"
    )
    return Row("CPU quota", finding, "warning", fix)


def _check_memory(hosts: Mapping[str, Sequence[RankFacts]]) -> Row:
    texts, tight = [], []
    for host, ranks in hosts.items():
        facts = ranks[0].facts
        total, limit = facts["memory_bytes"] or 0, facts["limits"]["memory_bytes"]
        text = f"{bytes_text(facts['available_bytes'] or 0)} free of {bytes_text(total)}"
        if limit is not None and limit < total:
            text += f", limited to {bytes_text(limit)} by the cgroup"
            # programs size caches by the memory they see; with a limit below half of it they are killed
            tight += [host] if limit < total / 2 else []
        texts.append((host, text))
    if tight:
        fix = "ask for what the run needs (Slurm --mem, docker --memory): above the limit the kernel kills it"
        return Row("memory", join_texts(texts), "note", fix)
    return Row("memory", join_texts(texts))


def _check_shm(hosts: Mapping[str, Sequence[RankFacts]]) -> Row:
    texts, small = [], []
    for host, ranks in hosts.items():
        size, free = (ranks[0].facts[name] for name in ("shm_bytes", "shm_free_bytes"))
        needed = SHM_BYTES_PER_RANK * len(ranks)
        texts.append((host, f"{bytes_text(free)} free of {bytes_text(size)}" if size else "does not exist"))
        small += [(host, needed)] if (free or 0) < needed else []
    if not small:
        return Row("/dev/shm", join_texts(texts))
    fix = (
        f"MPI needs {bytes_text(small[0][1])} there for the ranks of a host: docker --shm-size=1g, or"
        " mount -o remount,size=1G /dev/shm; remove files that dead runs left in it"
    )
    return Row("/dev/shm", join_texts(texts), "warning", fix)


def _check_ulimits(all_facts: Sequence[RankFacts]) -> list[Row]:
    finding = join_texts((one.name, ulimits_text(one.facts["ulimits"])) for one in all_facts)
    pinned = [
        o
        for o in all_facts
        if o.facts["infiniband"] and (o.facts["ulimits"]["memlock"] or 2**60) < MEMLOCK_BYTES
    ]
    if pinned:
        fix = (
            "InfiniBand pins memory: ulimit -l unlimited (limits.conf, or Slurm's"
            " PropagateResourceLimitsExcept)"
        )
        return [Row("ulimits", finding, "wrong", fix)]
    if any((one.facts["ulimits"]["nofile"] or 2**60) < FEW_FILES for one in all_facts):
        fix = f"checkpoints and connections need open files: ulimit -n {FEW_FILES * 64}"
        return [Row("ulimits", finding, "warning", fix)]
    return [Row("ulimits", finding)]


def ulimits_text(ulimits: Mapping[str, int | None]) -> str:
    """Format the limits of a process.

    >>> ulimits_text({"memlock": 65536, "nofile": 1024, "core": None})
    'memlock 64.0 KiB, open files 1024, core file unlimited'
    """
    memlock, nofile, core = (ulimits[name] for name in ("memlock", "nofile", "core"))
    return (
        f"memlock {'unlimited' if memlock is None else bytes_text(memlock)},"
        f" open files {'unlimited' if nofile is None else nofile},"
        f" core file {'unlimited' if core is None else 'none' if core == 0 else bytes_text(core)}"
    )


CHECK = Check(
    about="cores, NUMA nodes, threads, limits of CPU and memory, /dev/shm, ulimits",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=20.0,
    if_it_hangs="/proc or /sys does not answer: the kernel of that host has a problem, see dmesg",
)
