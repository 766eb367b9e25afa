"""The check `binding`: cores, NUMA nodes, threads and limits (cgroups, /dev/shm, ulimits) of each rank."""

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardtrain.doctor.check import (
    Facts,
    RankContext,
    RankFacts,
    Row,
    first_ranks,
    group_by_host,
    join_texts,
    merge_rows,
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
    hosts = group_by_host(all_facts)
    rows = [_check_cores(all_facts, list(hosts.values())), *merge_rows(all_facts, _judge_rank)]
    return rows + merge_rows(first_ranks(all_facts), lambda one: _judge_host(one, len(hosts[one.host])))


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


def _judge_rank(one: RankFacts) -> Iterator[Row]:
    cores, nodes, limited = one["cores"], one["nodes"], one["limits"]["cores"] or 0
    on = [node for node, of_node in nodes.items() if set(of_node) & set(cores)]
    if len(nodes) < 2:
        yield Row("NUMA", "one node")
    elif len(on) < 2:
        yield Row("NUMA", f"on node {', '.join(on)}")
    else:
        fix = (
            f"memory of another node is slower: for work on the CPU start {len(on)} ranks a host, one a node"
            f" (islands={len(on)}), or numactl --cpunodebind=0 --membind=0"
        )
        yield Row("NUMA", f"on node {', '.join(on)}: spread over nodes", "note", fix)
    many = [f"{n}={v}" for n, v in one["threads"].items() if (parse_count(v) or 0) > len(cores)]
    if many:
        fix = f"unset it, or set it to the cores of a rank: {len(cores)}"
        yield Row("threads", f"{', '.join(many)} on {len(cores)} cores", "warning", fix)
    if 0 < limited < len(cores):
        num_cores = max(1, int(limited))
        fix = (
            "the kernel stops the threads for a part of every 0.1 s: ask for more (docker --cpus, Slurm"
            f" --cpus-per-task), or bind to {num_cores} cores: taskset -c 0-{num_cores - 1}"
        )
        finding = f"{limited:g} cores of time, {len(cores)} are visible"
        yield Row("CPU quota", finding, "warning", fix)
    else:
        yield Row("CPU quota", "none below the number of visible cores")
    memlock = "unlimited" if one["memlock"] is None else bytes_text(one["memlock"])
    finding = f"memlock {memlock}, open files {one['nofile'] or 'unlimited'}"
    if one["infiniband"] and (one["memlock"] or 2**60) < MEMLOCK_BYTES:
        fix = (
            "InfiniBand pins memory: ulimit -l unlimited (limits.conf; Slurm: PropagateResourceLimitsExcept)"
        )
        yield Row("ulimits", finding, "wrong", fix)
    elif (one["nofile"] or 2**60) < FEW_FILES:
        fix = f"checkpoints and connections need open files: ulimit -n {FEW_FILES * 64}"
        yield Row("ulimits", finding, "warning", fix)
    else:
        yield Row("ulimits", finding)


def _judge_host(one: RankFacts, num_ranks: int) -> Iterator[Row]:
    total, limit = one["memory_bytes"] or 0, one["limits"]["memory_bytes"] or 2**62
    finding = f"{bytes_text(one['available_bytes'] or 0)} free of {bytes_text(total)}"
    if limit < total:
        finding += f", limited to {bytes_text(limit)} by the cgroup"
    # programs size caches by the memory they see; with a limit below half of it they are killed
    fix = "ask for what the run needs (Slurm --mem, docker --memory): above the limit the kernel kills it"
    yield Row("memory", finding, "note", fix) if limit < total / 2 else Row("memory", finding)
    free, size, needed = one["shm_free_bytes"], one["shm_bytes"], SHM_BYTES_PER_RANK * num_ranks
    finding = f"{bytes_text(free)} free of {bytes_text(size)}" if size else "does not exist"
    fix = (
        f"MPI needs {bytes_text(needed)} there for the ranks of a host: docker --shm-size=1g, or"
        " mount -o remount,size=1G /dev/shm; remove files that dead runs left in it"
    )
    yield Row("/dev/shm", finding, "warning", fix) if free < needed else Row("/dev/shm", finding)
