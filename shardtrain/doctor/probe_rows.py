"""The rows of the file-system probes: what each measured, or why it failed and how to fix that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardtrain.doctor.check import Row, Status, each, rate_text, some, time_text

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
"""Host -> what a probe measured there."""


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """How to make the row of a probe.

    Args:
      item: its name in the table.
      evaluate: results of all hosts -> (finding, fix); the fix is empty if all is well.
      status: the status if there is something to fix.
      status_of_error: the status if the probe failed.
    """

    item: str
    evaluate: Callable[[Results], tuple[str, str]]
    status: Status = "warning"
    status_of_error: Status = "wrong"

    def row(self, results: Results) -> Row:
        """Return the row for a probe's results, or for its errors where it failed."""
        if errors := [(host, result["error"]) for host, result in results.items() if "error" in result]:
            finding, fix = f"fails: {each(errors)}", fix_for([error for _, error in errors])
            status = self.status_of_error
        else:
            finding, fix = self.evaluate(results)
            status = self.status if fix else "ok"
        return Row(check="files", item=self.item, finding=finding, status=status, fix=fix)


def probe_rows(probes: Mapping[str, Mapping[str, Mapping]]) -> list[Row]:
    """Return a row for each probe that ran.

    Args:
      probes: host -> probe -> what it measured, or its `error`.
    """
    results = {name: {host: ran[name] for host, ran in probes.items() if name in ran} for name in ROWS}
    return [ROWS[name].row(results[name]) for name in ROWS if results[name]]


def _rename(results: Results) -> tuple[str, str]:
    if bad := [host for host, r in results.items() if not (r["replaces"] and r["moves_folders"])]:
        fix = "checkpoints are finished by a rename: give --run-dir another file system (not an object store)"
        return f"does not replace a file or move a folder on {some(bad)}", fix
    return "replaces a file, moves a whole folder", ""


def _fsync(results: Results) -> tuple[str, str]:
    finding = each(
        (host, f"a file in {time_text(r['file_seconds'])}, a folder in {time_text(r['folder_seconds'])}")
        for host, r in results.items()
    )
    slowest = max(max(r["file_seconds"], r["folder_seconds"]) for r in results.values())
    fix = (
        "save less often (--checkpoints.every-steps), or to a nearer disk: each save waits for"
        " dozens of these"
    )
    return finding, fix if slowest > SLOW_FSYNC_SECONDS else ""


def _locks(results: Results) -> tuple[str, str]:
    if unseen := [host for host, r in results.items() if not r["seen"]]:
        fix = "make sure that no two runs use one folder (NFS: mount without nolock; Lustre: with -o flock)"
        return f"a lock is not seen by another process on {some(unseen)}", fix
    return "a lock is seen by another process", ""


def _small(results: Results) -> tuple[str, str]:
    finding = each(
        (host, f"created in {time_text(r['create_seconds'])}, stat in {time_text(r['stat_seconds'])}")
        for host, r in results.items()
    )
    slowest = max(r["create_seconds"] for r in results.values())
    fix = "keep Python's environment and text files elsewhere: this file system is slow with many small files"
    return finding, fix if slowest > SLOW_FILE_SECONDS else ""


def _large(results: Results) -> tuple[str, str]:
    finding = each((host, rate_text(r["bytes_per_second"])) for host, r in results.items())
    slowest = min(r["bytes_per_second"] for r in results.values())
    minutes = CHECKPOINT_BYTES / slowest / 60
    fix = f"a checkpoint of 10 GB takes {minutes:.0f} minutes: save less often, or to a faster disk"
    return finding, fix if slowest < SLOW_BYTES_PER_SECOND else ""


ROWS: Mapping[str, ProbeRow] = {
    "rename": ProbeRow(item="rename", evaluate=_rename, status="wrong"),
    "fsync": ProbeRow(item="fsync", evaluate=_fsync),
    "lock": ProbeRow(item="lock", evaluate=_locks, status_of_error="warning"),
    "small": ProbeRow(item="small files", evaluate=_small),
    "large": ProbeRow(item="write", evaluate=_large),
}
"""Probe -> its row."""
