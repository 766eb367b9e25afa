"""The check `binding`: cores, NUMA nodes, threads and limits (cgroups, /dev/shm, ulimits) of each rank."""

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, group_by_host, join_texts
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
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "given": list(context.given_cores),
        "host_cores": os.cpu_count() or 1,
        "nodes": read_numa_nodes(),
        "threads": {name: context.environ[name] for name in THREADS if name in context.environ},
        "limits": limits(),
        "memory_bytes": memory_bytes("MemTotal"),
        "available_bytes": memory_bytes("MemAvailable"),
        "shm_bytes": shm.f_frsize * shm.f_blocks if shm else 0,
        "shm_free_bytes": shm.f_frsize * shm.f_bavail if shm else 0,
        "memlock": _read_soft_limit(resource.RLIMIT_MEMLOCK),
        "nofile": _read_soft_limit(resource.RLIMIT_NOFILE),
        "infiniband": Path("/sys/class/infiniband").is_dir(),
    }


def _read_soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def read_numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> dict[str, list[int]]:
    """Return NUMA node -> its cores; nodes without cores are left out."""
    lists = {path.parent.name: path.read_text() for path in sorted(folder.glob("node[0-9]*/cpulist"))}
    return {name.removeprefix("node"): parse_ranges(text) for name, text in lists.items() if text.strip()}


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for cores, NUMA nodes, limits on cores and memory, /dev/shm and ulimits."""
    hosts = list(group_by_host(all_facts).values())
    rows = [_check_cores(all_facts, hosts), _check_numa(all_facts), *_check_threads(all_facts)]
    return [
        *rows,
        _check_quota(all_facts),
        _check_memory(hosts),
        _check_shm(hosts),
        _check_ulimits(all_facts),
    ]


def _check_cores(all_facts: Sequence[RankFacts], hosts: Sequence[Sequence[RankFacts]]) -> Row:
    finding = join_texts((one.name, _cores_text(one)) for one in all_facts)
    for ranks in hosts:
        users: dict[int, list[str]] = {}
        for one in ranks:
            for core in one["cores"]:
                users.setdefault(core, []).append(one.name)
        shared = [core for core, names in users.items() if len(names) > 1]
        if not shared:
            continue
        host, all_cores, per_rank = (
            ranks[0].host,
            ranks[0]["host_cores"],
            ranks[0]["host_cores"] // len(ranks),
        )
        if not per_rank:
            text = f"{host}: {len(ranks)} ranks share {all_cores} cores; {finding}"
            fix = f"start {all_cores} ranks there or fewer: each waits while another computes"
            return Row("cores", text, "warning", fix)
        if len(users) >= len(ranks) and all(one["cores"] == ranks[0]["cores"] for one in ranks):
            text = f"{host}: {len(ranks)} ranks run anywhere on the same {len(users)} cores; {finding}"
            fix = (
                "unset SHARDTRAIN_BIND=no, so that each keeps to a share of its own"
                f" ({len(users) // len(ranks)} cores), or bind by the launcher: srun --cpu-bind=cores"
            )
            return Row("cores", text, "warning", fix)
        text = (
            f"{host}: {some(users[shared[0]])} are bound to the same cores {ranges_text(shared)}; {finding}"
        )
        fix = (
            f"{all_cores} cores are there: bind each rank to its own (mpiexec --bind-to none, then shardtrain"
            f" assigns {per_rank} to each; srun --cpus-per-task={per_rank})"
        )
        return Row("cores", text, "wrong", fix)
    return Row("cores", finding)


def _cores_text(one: RankFacts) -> str:
    num_cores = f"{len(one['cores'])} core{'s'[: len(one['cores']) != 1]}"
    own = f"{num_cores} ({ranges_text(one['cores'])} of {one['host_cores']})"
    return own if one["given"] == one["cores"] else f"{own}, its share of {ranges_text(one['given'])}"


def _check_numa(all_facts: Sequence[RankFacts]) -> Row:
    on = {
        one.name: [node for node, cores in one["nodes"].items() if set(cores) & set(one["cores"])]
        for one in all_facts
        if len(one["nodes"]) > 1
    }
    if not on:
        return Row("NUMA", "one node on every host")
    finding = join_texts((name, f"on node {', '.join(nodes)}") for name, nodes in on.items())
    num_nodes = max(len(nodes) for nodes in on.values())
    if num_nodes == 1:
        return Row("NUMA", finding)
    fix = (
        f"memory of another node is slower: for work on the CPU start {num_nodes} ranks a host, one a node"
        f" (islands={num_nodes}), or numactl --cpunodebind=0 --membind=0"
    )
    return Row("NUMA", f"{finding}: spread over nodes", "note", fix)


def _check_threads(all_facts: Sequence[RankFacts]) -> list[Row]:
    many = [
        (one.name, f"{name}={value} on {len(one['cores'])} cores")
        for one in all_facts
        for name, value in one["threads"].items()
        if (parse_count(value) or 0) > len(one["cores"])
    ]
    fix = f"unset it, or set it to the cores of a rank: {len(all_facts[0]['cores'])}"
    return [Row("threads", join_texts(many), "warning", fix)] if many else []


def _check_quota(all_facts: Sequence[RankFacts]) -> Row:
    tight = [one for one in all_facts if 0 < (one["limits"]["cores"] or 0) < len(one["cores"])]
    if not tight:
        return Row("CPU quota", "none below the number of visible cores")
    texts = (f"{one['limits']['cores']:g} cores of time, {len(one['cores'])} are visible" for one in tight)
    finding = join_texts(zip((one.name for one in tight), texts, strict=True))
    num_cores = max(1, int(tight[0]["limits"]["cores"]))
    fix = (
        "the kernel stops the threads for a part of every 0.1 s: ask for more (docker --cpus, Slurm"
        f" --cpus-per-task), or bind to {num_cores} cores: taskset -c 0-{num_cores - 1}"
    )
    return Row("CPU quota", finding, "warning", fix)


def _check_memory(hosts: Sequence[Sequence[RankFacts]]) -> Row:
    texts, tight = [], False
    for one, *_ in hosts:
        total, limit = one["memory_bytes"] or 0, one["limits"]["memory_bytes"]
        text = f"{bytes_text(one['available_bytes'] or 0)} free of {bytes_text(total)}"
        if limit is not None and limit < total:
            text += f", limited to {bytes_text(limit)} by the cgroup"
            # programs size caches by the memory they see; with a limit below half of it they are killed
            tight = tight or limit < total / 2
        texts.append((one.host, text))
    fix = "ask for what the run needs (Slurm --mem, docker --memory): above the limit the kernel kills it"
    return Row("memory", join_texts(texts), "note", fix) if tight else Row("memory", join_texts(texts))


def _check_shm(hosts: Sequence[Sequence[RankFacts]]) -> Row:
    sizes = [(ranks[0].host, ranks[0]["shm_free_bytes"], ranks[0]["shm_bytes"]) for ranks in hosts]
    finding = join_texts(
        (host, f"{bytes_text(free)} free of {bytes_text(size)}" if size else "does not exist")
        for host, free, size in sizes
    )
    for ranks in hosts:
        needed = SHM_BYTES_PER_RANK * len(ranks)
        if ranks[0]["shm_free_bytes"] < needed:
            fix = (
                f"MPI needs {bytes_text(needed)} there for the ranks of a host: docker --shm-size=1g, or"
                " mount -o remount,size=1G /dev/shm; remove files that dead runs left in it"
            )
            return Row("/dev/shm", finding, "warning", fix)
    return Row("/dev/shm", finding)


def _check_ulimits(all_facts: Sequence[RankFacts]) -> Row:
    finding = join_texts(
        (
            one.name,
            f"memlock {'unlimited' if one['memlock'] is None else bytes_text(one['memlock'])},"
            f" open files {one['nofile'] or 'unlimited'}",
        )
        for one in all_facts
    )
    if any(one["infiniband"] and (one["memlock"] or 2**60) < MEMLOCK_BYTES for one in all_facts):
        fix = (
            "InfiniBand pins memory: ulimit -l unlimited (limits.conf; Slurm: PropagateResourceLimitsExcept)"
        )
        return Row("ulimits", finding, "wrong", fix)
    fix = f"checkpoints and connections need open files: ulimit -n {FEW_FILES * 64}"
    few = any((one["nofile"] or 2**60) < FEW_FILES for one in all_facts)
    return Row("ulimits", finding, "warning", fix) if few else Row("ulimits", finding)
