"""The check `files`: whether the run folder supports checkpoints, and all ranks see the same one.

The probes of `file_probes.py` run in a temporary folder, which is removed again.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.doctor.check import (
    Check,
    Facts,
    RankContext,
    RankFacts,
    Row,
    group_by_host,
    join_texts,
    time_text,
)
from shardtrain.doctor.file_probes import fix_for, is_locked, measure_all, probe_rows, run_probe
from shardtrain.report.quantities import bytes_text
from shardtrain.system.excerpts import some

SEEN_SECONDS = 10.0
"""Longest wait until another host sees a new file; some file systems cache listings for 3 s."""

FREE_BYTES, FREE_INODES = 2 * 2**30, 10_000
TEMPORARY = {
    "tmpfs": "it is in memory, and lost when the machine or the job ends",
    "ramfs": "it is in memory, and lost when the machine or the job ends",
    "overlay": "it belongs to a container, and is lost with it",
}
"""File systems whose contents do not survive a restart."""


def collect(context: RankContext) -> Facts:
    """Probe the folder on the first rank of each host, and whether all ranks see rank 0's files and lock."""
    facts, folder = _make_probe_folder(context)
    try:
        if folder is not None and context.is_first_on_host:
            facts["probes"] = measure_all(folder, with_large=not context.quick)
        return facts | _collect_visibility(context, folder)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _make_probe_folder(context: RankContext) -> tuple[Facts, Path | None]:
    """Collect facts on the run folder, and make a probe folder in it, or in the nearest existing parent."""
    facts: Facts = {"path": str(context.run_dir), "error": None}
    if context.run_dir.exists() and not context.run_dir.is_dir():
        return facts | {"base": str(context.run_dir), "error": "ENOTDIR: it is a file"}, None
    base = find_nearest_folder(context.run_dir)
    mounts = Path("/proc/mounts")
    facts |= {"base": str(base), "there": context.run_dir.is_dir(), "space": run_probe(measure_space, base)}
    facts["mount"] = find_mount(base, mounts.read_text() if mounts.exists() else "")
    made: list[Path] = []

    def make(base: Path) -> Facts:
        made.append(Path(tempfile.mkdtemp(prefix=".shardtrain-doctor-", dir=base)))
        return {}

    return facts | {"error": run_probe(make, base).get("error")}, made[0] if made else None


def _collect_visibility(context: RankContext, folder: Path | None) -> Facts:
    """Test whether all ranks see a lock of rank 0, and rank 0 sees a file of every rank."""
    if context.control.size == 1:
        return {}
    first = context.rank == 0
    # rank 0 locks a file of its own, which all others must find locked
    lock_file = (folder / "held").open("w") if first and folder is not None else None
    try:
        if lock_file is not None:
            _lock(lock_file)
        theirs = context.control.all_gather("files", str(folder) if folder is not None else None)[0]
        if theirs is None:
            return {}
        facts: Facts = {}
        # the others look for the file and its lock, and leave a file each
        if not first:
            facts["sees_seconds"] = wait_for(Path(theirs) / "held")
            facts["sees_lock"] = facts["sees_seconds"] is not None and _sees_lock(Path(theirs) / "held")
            run_probe(lambda folder: (folder / f"seen-by-{context.rank}").touch() or {}, Path(theirs))
        context.control.all_gather("files are seen")
        # rank 0 counts these files, which may take a moment to appear on a network file system
        if first:
            began = time.monotonic()
            names = {rank: Path(theirs) / f"seen-by-{rank}" for rank in range(1, context.control.size)}
            left = lambda: SEEN_SECONDS - (time.monotonic() - began)  # noqa: E731
            facts["unseen"] = [
                rank for rank, path in names.items() if wait_for(path, max(left(), 0.0)) is None
            ]
        context.control.all_gather("files are counted")
        return facts
    finally:
        if lock_file is not None:
            lock_file.close()


def _lock(file) -> None:
    run_probe(lambda _: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) or {}, Path(file.name))


def _sees_lock(path: Path) -> bool:
    locked: list[bool] = []
    run_probe(lambda path: locked.append(is_locked(path)) or {}, path)
    return locked == [True]


def wait_for(path: Path, timeout_seconds: float = SEEN_SECONDS) -> float | None:
    """Return the seconds until a file is visible; None if that exceeds the time limit."""
    began = time.monotonic()
    while True:
        # listing makes a network file system ask its server again
        try:
            list(path.parent.iterdir())
            if path.exists():
                return time.monotonic() - began
        except OSError:
            pass
        if time.monotonic() - began >= timeout_seconds:
            return None
        time.sleep(0.05)


def find_mount(path: Path, mounts: str) -> Facts:
    """Return the mount that a path is on.

    Args:
      path: absolute, without links.
      mounts: the text of /proc/mounts.

    Returns:
      Its `type` and `source`, and whether it is `read_only`.

    >>> find_mount(Path("/data/x"), "d / ext4 rw 0 0\\nn:/d /data nfs4 ro,vers=4 0 0\\n")
    {'type': 'nfs4', 'source': 'n:/d', 'read_only': True}
    """
    mount = {"type": "unknown", "source": "", "read_only": False}
    longest = -1
    for line in mounts.splitlines():
        source, where, kind, options, *_ = line.split(" ")
        # spaces and tabs are written in octal
        where = where.encode().decode("unicode_escape")
        # of two mounts on one path the later one is visible
        if path.is_relative_to(where) and len(where) >= longest:
            longest = len(where)
            mount = {"type": kind, "source": source, "read_only": "ro" in options.split(",")}
    return mount


def find_nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest existing one above it."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path.resolve()


def measure_space(folder: Path) -> Facts:
    """Return the free space and inodes for this user."""
    stats = os.statvfs(folder)
    return {
        "free_bytes": stats.f_frsize * stats.f_bavail,
        "size_bytes": stats.f_frsize * stats.f_blocks,
        # file systems without a fixed number of inodes report 0 of 0
        "free_inodes": stats.f_favail if stats.f_files else None,
    }


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for the folder, its visibility on all ranks, its space, and each probe."""
    hosts = {host: ranks[0] for host, ranks in group_by_host(all_facts).items()}
    refused = [(one.name, one.facts["error"]) for one in all_facts if one.facts["error"]]
    rows = [_check_refused(all_facts[0], refused) if refused else _check_folder(hosts)]
    if len(all_facts) > 1 and all_facts[0].rank == 0 and "unseen" in all_facts[0].facts:
        rows.append(_check_shared(all_facts))
    with_space = {host: one for host, one in hosts.items() if one.facts.get("space", {}).get("size_bytes")}
    rows += [_check_space(with_space)] if with_space else []
    probes = {host: one.facts["probes"] for host, one in hosts.items() if "probes" in one.facts}
    return rows + (probe_rows(probes) if probes else [])


def _check_refused(first: RankFacts, refused: Sequence[tuple[str, str]]) -> Row:
    finding = f"{first.facts['base']} cannot be written: {join_texts(refused)}"
    fix = fix_for([error for _, error in refused])
    return Row("run folder", finding, "wrong", fix)


def _check_folder(hosts: Mapping[str, RankFacts]) -> Row:
    finding = join_texts((host, _folder_text(one.facts)) for host, one in hosts.items())
    if lost := [
        one.facts["mount"]["type"] for one in hosts.values() if one.facts["mount"]["type"] in TEMPORARY
    ]:
        fix = f"copy what you need from it, or give another --run-dir: {TEMPORARY[lost[0]]}"
        return Row("run folder", finding, "note", fix)
    return Row("run folder", finding)


def _folder_text(facts: Mapping) -> str:
    mount = facts["mount"]
    there = "" if facts["there"] else f" ({facts['path']} does not exist yet)"
    return f"{facts['base']}{there} on {mount['type']} of {mount['source']}"


def _check_shared(all_facts: Sequence[RankFacts]) -> Row:
    """Return the row for whether all ranks see the same folder."""
    others = all_facts[1:]
    unseeing = {one.rank: one for one in others if one.facts.get("sees_seconds") is None}
    unseeing |= {one.rank: one for one in others if one.rank in all_facts[0].facts["unseen"]}
    if unseeing:
        names = some([one.name for _, one in sorted(unseeing.items())])
        finding = f"{names} and {all_facts[0].name} do not see each other's files within {SEEN_SECONDS:.0f} s"
        fix = (
            "the run folder is not the same on all hosts: give --run-dir a path on a shared file system;"
            " islands resume from what rank 0 saved there"
        )
        return Row("shared", finding, "wrong", fix)
    slowest = max(one.facts["sees_seconds"] for one in others)
    finding = f"all {len(all_facts)} ranks see the same folder, a new file within {time_text(slowest)}"
    unlocked = [one.name for one in others if not one.facts["sees_lock"]]
    if unlocked:
        fix = (
            "make sure that nobody starts a second run in this folder: the lock against that is not seen"
            " everywhere"
        )
        finding += f"; the lock of {all_facts[0].name} is not seen by {some(unlocked)}"
        return Row("shared", finding, "warning", fix)
    return Row("shared", f"{finding}, and its lock")


def _check_space(hosts: Mapping[str, RankFacts]) -> Row:
    texts, small = [], []
    for host, one in hosts.items():
        room = one.facts["space"]
        inodes = room["free_inodes"]
        names = "" if inodes is None else f", room for {inodes:,} more files"
        texts.append(
            (host, f"{bytes_text(room['free_bytes'])} free of {bytes_text(room['size_bytes'])}{names}")
        )
        few = inodes is not None and inodes < FREE_INODES
        small += [(host, room["free_bytes"])] if room["free_bytes"] < FREE_BYTES or few else []
    if not small:
        return Row("space", join_texts(texts))
    fix = (
        "a checkpoint needs 12 bytes a parameter with Adam, and is written before the last is deleted:"
        f" {bytes_text(small[0][1])} hold two of {small[0][1] // 24:,} parameters; delete old files,"
        " or give another --run-dir"
    )
    return Row("space", join_texts(texts), "warning", fix)


CHECK = Check(
    about="the run folder: its file system, rename, fsync, lock, speed, space, visibility on all ranks",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=90.0,
    if_it_hangs=(
        "the file system of the run folder does not answer: see mount, dmesg and the file server; or give"
        " another --run-dir"
    ),
)
