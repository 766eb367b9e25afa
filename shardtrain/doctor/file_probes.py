"""Probe what checkpoints need from a file system: rename, fsync, lock, small files, one large file.

A probe measures in an empty folder, and judges the results of all hosts. Next: `files.py`.
"""

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shardtrain.doctor.check import Facts, Row, Status, join_texts, rate_text, time_text
from shardtrain.system.excerpts import some

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

SLOW_FSYNC_SECONDS, SLOW_FILE_SECONDS, SLOW_BYTES_PER_SECOND = 0.1, 0.05, 50e6
CHECKPOINT_BYTES = 10 * 10**9
"""Size of an example checkpoint: 0.8 billion parameters with Adam's moments."""

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


def fix_for(errors: Sequence[str]) -> str:
    """Return the fix for an error of the operating system.

    >>> fix_for(["EROFS: Read-only file system"])[:24]
    'it is mounted read-only:'
    """
    name = errors[0].partition(":")[0]
    return FIXES.get(name, "give --run-dir a folder on another file system, or repair this one")


Results = Mapping[str, Mapping]
"""Host -> the measurements of a probe there."""


@dataclass(frozen=True)
class Probe:
    """A test of something that checkpoints need from a folder.

    Args:
      item: its name in the table.
      measure: measures in a folder.
      judge: results of all hosts -> (finding, fix); the fix is empty if nothing is wrong.
      status: the status if there is something to fix.
      status_of_error: the status if measuring failed.
    """

    item: str
    measure: Callable[[Path], Facts]
    judge: Callable[[Results], tuple[str, str]]
    status: Status = "warning"
    status_of_error: Status = "wrong"

    def row(self, results: Results) -> Row:
        """Return the row for the results, or for errors."""
        if errors := [(host, result["error"]) for host, result in results.items() if "error" in result]:
            fix = fix_for([error for _, error in errors])
            return Row(self.item, f"fails: {join_texts(errors)}", self.status_of_error, fix)
        finding, fix = self.judge(results)
        return Row(self.item, finding, self.status if fix else "ok", fix)


def measure_all(folder: Path, *, with_large: bool) -> Facts:
    """Run all probes in a folder; return probe -> its measurements, or its `error`.

    Args:
      folder: a temporary folder.
      with_large: whether to write a large file too.
    """
    chosen = {name: probe for name, probe in PROBES.items() if with_large or name != "large"}
    return {name: run_probe(probe.measure, folder) for name, probe in chosen.items()}


def probe_rows(probes: Mapping[str, Mapping[str, Mapping]]) -> list[Row]:
    """Return a row for each probe that ran, from host -> probe -> its measurements, or its `error`."""
    results = {name: {host: ran[name] for host, ran in probes.items() if name in ran} for name in PROBES}
    return [PROBES[name].row(found) for name, found in results.items() if found]


def run_probe(probe: Callable[[Path], Facts], folder: Path) -> Facts:
    """Return the result of a probe, or its `error`: the name and text of the system's error."""
    try:
        return probe(folder)
    except OSError as error:
        return {"error": f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"}


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


def _judge_rename(results: Results) -> tuple[str, str]:
    if bad := [host for host, r in results.items() if not (r["replaces"] and r["moves_folders"])]:
        fix = "checkpoints are finished by a rename: give --run-dir another file system (not an object store)"
        return f"does not replace a file or move a folder on {some(bad)}", fix
    return "replaces a file, moves a whole folder", ""


def measure_fsync(folder: Path) -> Facts:
    """Measure how long fsync of a small file and of a folder takes."""
    files, folders = [], []
    for number in range(NUM_SYNCS):
        with (folder / f"synced-{number}").open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            files.append(_measure_seconds(lambda file=file: os.fsync(file.fileno())))
        folders.append(_measure_seconds(lambda: sync_folder(folder)))
    return {"file_seconds": median(files), "folder_seconds": median(folders)}


def _judge_fsync(results: Results) -> tuple[str, str]:
    finding = join_texts(
        (host, f"a file in {time_text(r['file_seconds'])}, a folder in {time_text(r['folder_seconds'])}")
        for host, r in results.items()
    )
    slowest = max(max(r["file_seconds"], r["folder_seconds"]) for r in results.values())
    fix = (
        "save less often (--checkpoints.every-steps), or to a nearer disk: each save waits for"
        " dozens of these"
    )
    return finding, fix if slowest > SLOW_FSYNC_SECONDS else ""


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def probe_lock(folder: Path) -> Facts:
    """Return whether another process sees a lock that is held."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        code = subprocess.run([sys.executable, "-I", "-S", "-c", TRY_LOCK, file.name], check=False).returncode
    return {"seen": code == SEEN}


def _judge_lock(results: Results) -> tuple[str, str]:
    if unseen := [host for host, r in results.items() if not r["seen"]]:
        fix = "make sure that no two runs use one folder (NFS: mount without nolock; Lustre: with -o flock)"
        return f"a lock is not seen by another process on {some(unseen)}", fix
    return "a lock is seen by another process", ""


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock of a file."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def measure_small(folder: Path) -> Facts:
    """Measure how long it takes to create a small file, and to stat it."""
    paths = [folder / f"small-{number}" for number in range(NUM_SMALL)]
    created = [_measure_seconds(lambda path=path: path.write_bytes(b"x")) for path in paths]
    stats = [_measure_seconds(path.stat) for path in paths]
    return {"create_seconds": median(created), "stat_seconds": median(stats)}


def _judge_small(results: Results) -> tuple[str, str]:
    finding = join_texts(
        (host, f"created in {time_text(r['create_seconds'])}, stat in {time_text(r['stat_seconds'])}")
        for host, r in results.items()
    )
    slowest = max(r["create_seconds"] for r in results.values())
    fix = "keep Python's environment and text files elsewhere: this file system is slow with many small files"
    return finding, fix if slowest > SLOW_FILE_SECONDS else ""


def measure_large(folder: Path, num_bytes: int = LARGE_BYTES) -> Facts:
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


def _judge_large(results: Results) -> tuple[str, str]:
    finding = join_texts((host, rate_text(r["bytes_per_second"])) for host, r in results.items())
    slowest = min(r["bytes_per_second"] for r in results.values())
    minutes = CHECKPOINT_BYTES / slowest / 60
    fix = f"a checkpoint of 10 GB takes {minutes:.0f} minutes: save less often, or to a faster disk"
    return finding, fix if slowest < SLOW_BYTES_PER_SECOND else ""


def _measure_seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


PROBES: Mapping[str, Probe] = {
    "rename": Probe("rename", probe_rename, _judge_rename, "wrong"),
    "fsync": Probe("fsync", measure_fsync, _judge_fsync),
    "lock": Probe("lock", probe_lock, _judge_lock, status_of_error="warning"),
    "small": Probe("small files", measure_small, _judge_small),
    "large": Probe("write", measure_large, _judge_large),
}
"""Name -> probe; all probes use the same folder."""
