"""Probes of what checkpoints need of a file system: rename, fsync, lock, small files, one large file.

A probe is a function of an empty folder; it returns what it measured. Rows are made in `probe_rows.py`.
"""

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from shardtrain.doctor.check import Facts

NUM_SMALL, NUM_SYNCS = 16, 5
LARGE_BYTES, BLOCK_BYTES = 64 * 2**20, 2**20

SEEN = 3
TRY_LOCK = f"""
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit({SEEN})
"""


def mount_of(path: Path, mounts: str) -> Facts:
    """Return the mount that a path is on.

    Args:
      path: absolute, without links.
      mounts: the text of /proc/mounts.

    Returns:
      Its `type`, `source`, and whether it is `read_only`.

    >>> mount_of(Path("/data/x"), "d / ext4 rw 0 0\\nn:/d /data nfs4 ro,vers=4 0 0\\n")
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


def nearest(path: Path) -> Path:
    """Return the folder itself, or the nearest existing one above it."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path.resolve()


def space(folder: Path) -> Facts:
    """Return the free space and inodes for this user."""
    stats = os.statvfs(folder)
    return {
        "free_bytes": stats.f_frsize * stats.f_bavail,
        "size_bytes": stats.f_frsize * stats.f_blocks,
        # file systems without a fixed number of inodes report 0 of 0
        "free_inodes": stats.f_favail if stats.f_files else None,
    }


def probe(folder: Path, large_bytes: int) -> Facts:
    """Run all probes in a temporary folder.

    Returns:
      Probe -> what it measured, or its `error`: the name and text of the system's error.
    """
    probes: dict[str, Callable[[Path], Facts]] = {
        "rename": rename,
        "fsync": fsync,
        "lock": lock,
        "small": small,
        "large": lambda folder: large(folder, large_bytes),
    }
    return {
        name: result_or_error(run, folder) for name, run in probes.items() if name != "large" or large_bytes
    }


def result_or_error(probe: Callable[[Path], Facts], folder: Path) -> Facts:
    """Return the result of a probe, or its error."""
    try:
        return probe(folder)
    except OSError as error:
        return {"error": f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"}


def rename(folder: Path) -> Facts:
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


def fsync(folder: Path) -> Facts:
    """Measure how long fsync of a small file and of a folder takes."""
    files, folders = [], []
    for number in range(NUM_SYNCS):
        with (folder / f"synced-{number}").open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            files.append(_timed(lambda file=file: os.fsync(file.fileno())))
        folders.append(_timed(lambda: sync_folder(folder)))
    return {"file_seconds": median(files), "folder_seconds": median(folders)}


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def lock(folder: Path) -> Facts:
    """Return whether another process sees a lock that is held."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        code = subprocess.run([sys.executable, "-I", "-S", "-c", TRY_LOCK, file.name], check=False).returncode
    return {"seen": code == SEEN}


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock of a file."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def small(folder: Path) -> Facts:
    """Measure how long it takes to create a small file, and to stat it."""
    paths = [folder / f"small-{number}" for number in range(NUM_SMALL)]
    created = [_timed(lambda path=path: path.write_bytes(b"x")) for path in paths]
    stats = [_timed(path.stat) for path in paths]
    return {"create_seconds": median(created), "stat_seconds": median(stats)}


def large(folder: Path, num_bytes: int) -> Facts:
    """Measure how fast a large file is written to the disk."""
    # not zeros, which some file systems do not store
    block = os.urandom(BLOCK_BYTES)
    began = time.monotonic()
    with (folder / "large").open("wb") as file:
        for _ in range(num_bytes // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes_per_second": num_bytes / (time.monotonic() - began)}


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
