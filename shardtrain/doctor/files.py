"""The check `files`: whether the run folder supports checkpoints, and all ranks see the same one.

Probes run in a temporary folder: rename, fsync, lock, small files, one large file; it is removed again.
"""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from shardtrain.doctor.check import (
    Facts,
    RankContext,
    RankFacts,
    Row,
    first_ranks,
    merge_rows,
    rate_text,
    time_text,
)
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

NUM_SMALL, NUM_SYNCS = 16, 5
LARGE_BYTES, BLOCK_BYTES = 64 * 2**20, 2**20
SLOW_FSYNC_SECONDS, SLOW_FILE_SECONDS, SLOW_BYTES_PER_SECOND = 0.1, 0.05, 50e6
CHECKPOINT_BYTES = 10 * 10**9
"""Size of an example checkpoint: 0.8 billion parameters with Adam's moments."""

LOCKED = 3
TRY_LOCK = f"""
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit({LOCKED})
"""

FIXES = {
    "EROFS": "it is mounted read-only: give --run-dir a folder that can be written, or have it mounted rw",
    "EACCES": "you may not write there: give --run-dir a folder of yours, or ask its owner (chmod g+w)",
    "EPERM": "you may not write there: give --run-dir a folder of yours, or ask its owner (chmod g+w)",
    "ENOSPC": "it is full: delete what is not needed (old checkpoints first), or give another --run-dir",
    "EDQUOT": "your quota is used up (quota -s): delete what is not needed, or give another --run-dir",
    "ESTALE": "the file server lost this folder: mount it again",
    "EIO": "the disk or the file server fails: see dmesg, and give another --run-dir until then",
    "ENOTDIR": "a file is in its place: give another --run-dir, or move that file away",
}
"""Error name (errno) -> fix."""


def collect(context: RankContext) -> Facts:
    """Probe the folder on the first rank of each host, and whether all ranks see rank 0's files and lock."""
    run_dir, mounts = context.run_dir, Path("/proc/mounts")
    facts: Facts = {"path": str(run_dir), "base": str(run_dir), "there": run_dir.is_dir(), "error": None}
    folder = None
    if run_dir.exists() and not run_dir.is_dir():
        facts["error"] = "ENOTDIR: it is a file"
    else:
        base = find_nearest_folder(run_dir)
        mount = find_mount(base, mounts.read_text() if mounts.exists() else "")
        facts |= {"base": str(base), "mount": mount, "space": run_probe(measure_space, base)}
        made = run_probe(
            lambda base: {"path": tempfile.mkdtemp(prefix=".shardtrain-doctor-", dir=base)}, base
        )
        facts["error"], folder = made.get("error"), Path(made["path"]) if "path" in made else None
    try:
        if folder is not None and context.is_first_on_host:
            facts["probes"] = run_probes(folder, with_large=not context.quick)
        return facts | _collect_visibility(context, folder)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def find_nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest existing one above it."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir()).resolve()


def find_mount(path: Path, mounts: str) -> Facts:
    """Return the mount that a path is on.

    Args:
      path: absolute, without links.
      mounts: the text of /proc/mounts.

    Returns:
      Its `type` and `source`.

    >>> find_mount(Path("/data/x"), "d / ext4 rw 0 0\\nn:/d /data nfs4 ro,vers=4 0 0\\n")
    {'type': 'nfs4', 'source': 'n:/d'}
    """
    found, longest = {"type": "unknown", "source": ""}, -1
    for line in mounts.splitlines():
        source, where, kind, *_ = line.split(" ")
        # spaces and tabs are written in octal
        where = where.encode().decode("unicode_escape")
        # of two mounts on one path the later one is visible
        if path.is_relative_to(where) and len(where) >= longest:
            found, longest = {"type": kind, "source": source}, len(where)
    return found


def measure_space(folder: Path) -> Facts:
    """Return the free space and inodes for this user."""
    stats = os.statvfs(folder)
    return {
        "free_bytes": stats.f_frsize * stats.f_bavail,
        "size_bytes": stats.f_frsize * stats.f_blocks,
        # file systems without a fixed number of inodes report 0 of 0
        "free_inodes": stats.f_favail if stats.f_files else None,
    }


def run_probe(probe: Callable[[Path], Facts], folder: Path) -> Facts:
    """Return the result of a probe, or its `error`: the name and text of the system's error."""
    try:
        return probe(folder)
    except OSError as error:
        return {"error": f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"}


def run_probes(folder: Path, *, with_large: bool) -> Facts:
    """Run all probes in a temporary folder; return probe -> its measurements, or its `error`."""
    chosen = {name: probe for name, (probe, _) in PROBES.items() if with_large or name != "write"}
    return {name: run_probe(probe, folder) for name, probe in chosen.items()}


def probe_rename(folder: Path) -> Facts:
    """Return whether a rename replaces a file atomically, and can move a whole folder."""
    old, new = folder / "old", folder / "new"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    (folder / "step.new").mkdir()
    (folder / "step.new" / "file").write_text("in it")
    (folder / "step.new").rename(folder / "step")
    moved = (folder / "step" / "file").read_text() == "in it" and not (folder / "step.new").exists()
    return {"replaces": old.read_text() == "new" and not new.exists(), "moves_folders": moved}


def measure_fsync(folder: Path) -> Facts:
    """Measure how long fsync of a small file and of a folder takes."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    files, folders = [], []
    try:
        for number in range(NUM_SYNCS):
            with (folder / f"synced-{number}").open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                files.append(_measure_seconds(lambda file=file: os.fsync(file.fileno())))
            folders.append(_measure_seconds(lambda: os.fsync(opened)))
    finally:
        os.close(opened)
    return {"file_seconds": median(files), "folder_seconds": median(folders)}


def probe_lock(folder: Path) -> Facts:
    """Return whether another process sees a lock that is held."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        code = subprocess.run([sys.executable, "-I", "-S", "-c", TRY_LOCK, file.name], check=False).returncode
    return {"seen": code == LOCKED}


def measure_small(folder: Path) -> Facts:
    """Measure how long it takes to create a small file, and to stat it."""
    paths = [folder / f"small-{number}" for number in range(NUM_SMALL)]
    created = [_measure_seconds(lambda path=path: path.write_bytes(b"x")) for path in paths]
    return {
        "create_seconds": median(created),
        "stat_seconds": median(_measure_seconds(p.stat) for p in paths),
    }


def measure_large(folder: Path) -> Facts:
    """Measure how fast a large file is written to the disk."""
    # not zeros, which some file systems do not store
    block = os.urandom(BLOCK_BYTES)
    began = time.monotonic()
    with (folder / "large").open("wb") as file:
        for _ in range(LARGE_BYTES // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes_per_second": LARGE_BYTES / (time.monotonic() - began)}


def _measure_seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def _judge_rename(r: Facts) -> tuple[str, str]:
    if r["replaces"] and r["moves_folders"]:
        return "replaces a file, moves a whole folder", ""
    fix = "checkpoints are finished by a rename: give --run-dir another file system (not an object store)"
    return "does not replace a file or move a folder", fix


def _judge_fsync(r: Facts) -> tuple[str, str]:
    slow = max(r["file_seconds"], r["folder_seconds"]) > SLOW_FSYNC_SECONDS
    fix = "save less often (--checkpoints.every-steps), or to a nearer disk: a save waits for dozens of these"
    finding = f"a file in {time_text(r['file_seconds'])}, a folder in {time_text(r['folder_seconds'])}"
    return finding, fix if slow else ""


def _judge_lock(r: Facts) -> tuple[str, str]:
    fix = "make sure that no two runs use one folder (NFS: mount without nolock; Lustre: with -o flock)"
    seen = "a lock is seen by another process"
    return (seen, "") if r["seen"] else ("a lock is not seen by another process", fix)


def _judge_small(r: Facts) -> tuple[str, str]:
    fix = "keep Python's environment and text files elsewhere: this file system is slow with many small files"
    finding = f"created in {time_text(r['create_seconds'])}, stat in {time_text(r['stat_seconds'])}"
    return finding, fix if r["create_seconds"] > SLOW_FILE_SECONDS else ""


def _judge_large(r: Facts) -> tuple[str, str]:
    minutes = CHECKPOINT_BYTES / r["bytes_per_second"] / 60
    fix = f"a checkpoint of 10 GB takes {minutes:.0f} minutes: save less often, or to a faster disk"
    return rate_text(r["bytes_per_second"]), fix if r["bytes_per_second"] < SLOW_BYTES_PER_SECOND else ""


PROBES: Mapping[str, tuple[Callable[[Path], Facts], Callable[[Facts], tuple[str, str]]]] = {
    "rename": (probe_rename, _judge_rename),
    "fsync": (measure_fsync, _judge_fsync),
    "lock": (probe_lock, _judge_lock),
    "small files": (measure_small, _judge_small),
    "write": (measure_large, _judge_large),
}
"""Item -> its probe, which measures in a folder, and a function of its result -> (finding, fix or "")."""


def _collect_visibility(context: RankContext, folder: Path | None) -> Facts:
    """Test whether all ranks see a lock of rank 0, and rank 0 sees a file of every rank."""
    control, rank = context.control, context.rank
    if control.size == 1:
        return {}
    # rank 0 locks a file of its own, which all others must find locked
    lock_file = (folder / "held").open("w") if rank == 0 and folder is not None else None
    try:
        if lock_file is not None:
            run_probe(lambda _: {"locked": fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)}, Path())
        shared = control.all_gather("files", str(folder) if folder is not None else None)[0]
        if shared is None:
            return {}
        theirs = Path(shared)
        facts: Facts = {}
        # the others look for the file and its lock, and leave a file each
        if rank:
            facts = {"sees_seconds": wait_for(theirs / "held", time.monotonic() + SEEN_SECONDS)}
            facts["sees_lock"] = run_probe(is_locked, theirs / "held").get("locked", False)
            run_probe(lambda folder: {"left": (folder / f"seen-by-{rank}").touch()}, theirs)
        control.all_gather("files are seen")
        # rank 0 counts these files, which may take a moment to appear on a network file system
        if not rank:
            until = time.monotonic() + SEEN_SECONDS
            seen = {other: wait_for(theirs / f"seen-by-{other}", until) for other in range(1, control.size)}
            facts["unseen"] = [other for other, seconds in seen.items() if seconds is None]
        control.all_gather("files are counted")
        return facts
    finally:
        if lock_file is not None:
            lock_file.close()


def is_locked(path: Path) -> Facts:
    """Return whether another process has `locked` a file that exists."""
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"locked": True}
    return {"locked": False}


def wait_for(path: Path, until: float) -> float | None:
    """Return the seconds until a file is visible; None if it is not at that time of the monotonic clock."""
    began = time.monotonic()
    while True:
        # listing makes a network file system ask its server again
        if run_probe(lambda folder: {"seen": list(folder.iterdir()) and path.exists()}, path.parent).get(
            "seen"
        ):
            return time.monotonic() - began
        if time.monotonic() >= until:
            return None
        time.sleep(0.05)


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for the folder, its visibility on all ranks, its space, and each probe."""
    rows = merge_rows(all_facts, lambda one: [_judge_folder(one)])
    if len(all_facts) > 1 and "unseen" in all_facts[0]:
        rows.append(_check_shared(all_facts))
    return rows + merge_rows(first_ranks(all_facts), _judge_host)


def _judge_folder(one: RankFacts) -> Row:
    if error := one["error"]:
        return Row("run folder", f"{one['base']} cannot be written: {error}", "wrong", fix_for(error))
    mount, there = one["mount"], "" if one["there"] else f" ({one['path']} does not exist yet)"
    finding = f"{one['base']}{there} on {mount['type']} of {mount['source']}"
    lost = TEMPORARY.get(mount["type"])
    fix = f"copy what you need from it, or give another --run-dir: {lost}"
    return Row("run folder", finding, "note", fix) if lost else Row("run folder", finding)


def _judge_host(one: RankFacts) -> Iterator[Row]:
    if (space := one.get("space", {})).get("size_bytes"):
        free, inodes = space["free_bytes"], space["free_inodes"]
        names = "" if inodes is None else f", room for {inodes:,} more files"
        finding = f"{bytes_text(free)} free of {bytes_text(space['size_bytes'])}{names}"
        fix = (
            "a checkpoint needs 12 bytes a parameter with Adam, and is written before the last is deleted:"
            f" {bytes_text(free)} hold two of {free // 24:,} parameters; delete old files, or give another"
            " --run-dir"
        )
        is_small = free < FREE_BYTES or (inodes is not None and inodes < FREE_INODES)
        yield Row("space", finding, "warning", fix) if is_small else Row("space", finding)
    for item, result in one.get("probes", {}).items():
        status = "warning" if item == "lock" else "wrong"
        if error := result.get("error"):
            yield Row(item, f"fails: {error}", status, fix_for(error))
            continue
        finding, fix = PROBES[item][1](result)
        status = "wrong" if item == "rename" else "warning"
        yield Row(item, finding, status, fix) if fix else Row(item, finding)


def fix_for(error: str) -> str:
    """Return the fix for an error of the operating system.

    >>> fix_for("EROFS: Read-only file system")[:24]
    'it is mounted read-only:'
    """
    default = "give --run-dir a folder on another file system, or repair this one"
    return FIXES.get(error.partition(":")[0], default)


def _check_shared(all_facts: Sequence[RankFacts]) -> Row:
    """Return the row for whether all ranks see the same folder."""
    first, *others = all_facts
    unseeing = [o.name for o in others if o.get("sees_seconds") is None or o.rank in first["unseen"]]
    if unseeing:
        finding = (
            f"{some(unseeing)} and {first.name} do not see each other's files within {SEEN_SECONDS:.0f} s"
        )
        fix = (
            "the run folder is not the same on all hosts: give --run-dir a path on a shared file system;"
            " islands resume from what rank 0 saved there"
        )
        return Row("shared", finding, "wrong", fix)
    slowest = max(one["sees_seconds"] for one in others)
    finding = f"all {len(all_facts)} ranks see the same folder, a new file within {time_text(slowest)}"
    if unlocked := [one.name for one in others if not one["sees_lock"]]:
        fix = "start no second run in this folder: the lock against that is not seen everywhere"
        finding += f"; the lock of {first.name} is not seen by {some(unlocked)}"
        return Row("shared", finding, "warning", fix)
    return Row("shared", f"{finding}, and its lock")
