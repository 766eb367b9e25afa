"""Rows of the file-system probes: what each measured or why it failed, and what to do about it."""

from collections.abc import Mapping, Sequence

from shardtrain.doctor.check import Row, each, rate_text, some, time_text

SLOW_FSYNC_SECONDS, SLOW_FILE_SECONDS, SLOW_BYTES_PER_SECOND = 0.1, 0.05, 50e6
CHECKPOINT_BYTES = 10 * 10**9
"""Size of an example checkpoint: 0.8 billion parameters with Adam's moments."""

CURES = {
    "EROFS": "it is mounted read-only: give --run-dir a folder that can be written, or have it mounted rw",
    "EACCES": "you may not write there: give --run-dir a folder of yours, or ask its owner (chmod g+w)",
    "EPERM": "you may not write there: give --run-dir a folder of yours, or ask its owner (chmod g+w)",
    "ENOSPC": "it is full: delete what is not needed (old checkpoints first), or give another --run-dir",
    "EDQUOT": "your quota is used up (quota -s): delete what is not needed, or give another --run-dir",
    "ESTALE": "the file server lost this folder: mount it again",
    "EIO": "the disk or the file server fails: see dmesg, and give another --run-dir until then",
    "ENOTDIR": "a file stands in its place: give another --run-dir, or move that file away",
}
"""Name of an error -> what to do."""


def cure(errors: Sequence[str]) -> str:
    """Return what to do about an error of the operating system.

    >>> cure(["EROFS: Read-only file system"])[:24]
    'it is mounted read-only:'
    """
    name = errors[0].partition(":")[0]
    return CURES.get(name, "give --run-dir a folder on another file system, or mend this one")


def probe_rows(probes: Mapping[str, Mapping]) -> list[Row]:
    """Return a row for each probe.

    Args:
      probes: host -> probe -> what it measured, or its `error`.
    """
    broken = {
        name: [
            (host, answers[name]["error"])
            for host, answers in probes.items()
            if "error" in answers.get(name, {})
        ]
        for name in ("rename", "fsync", "lock", "small", "large")
    }
    rows = []
    for name, row in (
        ("rename", _rename),
        ("fsync", _fsync),
        ("lock", _locks),
        ("small", _small),
        ("large", _large),
    ):
        if broken[name]:
            errors = [error for _, error in broken[name]]
            verdict = "warning" if name == "lock" else "wrong"
            found, do = f"fails: {each(broken[name])}", cure(errors)
            rows.append(Row(check="files", what=TITLES[name], found=found, verdict=verdict, do=do))
        elif answers := {host: found[name] for host, found in probes.items() if name in found}:
            rows.append(row(answers))
    return rows


TITLES = {
    "rename": "rename",
    "fsync": "fsync",
    "lock": "lock",
    "small": "small files",
    "large": "write",
}
"""Probe -> its name in the table."""


def _rename(answers: Mapping[str, Mapping]) -> Row:
    if bad := [host for host, a in answers.items() if not (a["replaces"] and a["moves_folders"])]:
        do = "checkpoints are finished by a rename: give --run-dir another file system (not an object store)"
        found = f"does not replace a file or move a folder on {some(bad)}"
        return Row(check="files", what="rename", found=found, verdict="wrong", do=do)
    return Row(check="files", what="rename", found="replaces a file, moves a whole folder")


def _fsync(answers: Mapping[str, Mapping]) -> Row:
    found = each(
        (host, f"a file in {time_text(a['file_seconds'])}, a folder in {time_text(a['folder_seconds'])}")
        for host, a in answers.items()
    )
    slowest = max(max(a["file_seconds"], a["folder_seconds"]) for a in answers.values())
    if slowest > SLOW_FSYNC_SECONDS:
        do = (
            "save less often (--checkpoints.every-steps), or to a nearer disk: each save waits for"
            " dozens of these"
        )
        return Row(check="files", what="fsync", found=found, verdict="warning", do=do)
    return Row(check="files", what="fsync", found=found)


def _locks(answers: Mapping[str, Mapping]) -> Row:
    if blind := [host for host, a in answers.items() if not a["seen"]]:
        do = "see yourself that no two runs use one folder (NFS: mount without nolock; Lustre: with -o flock)"
        found = f"a lock that is held is not seen by another process on {some(blind)}"
        return Row(check="files", what="lock", found=found, verdict="warning", do=do)
    return Row(check="files", what="lock", found="a lock that is held is seen by another process")


def _small(answers: Mapping[str, Mapping]) -> Row:
    found = each(
        (host, f"made in {time_text(a['create_seconds'])}, looked at in {time_text(a['stat_seconds'])}")
        for host, a in answers.items()
    )
    if max(a["create_seconds"] for a in answers.values()) > SLOW_FILE_SECONDS:
        do = (
            "keep Python's environment and text files elsewhere: this file system is slow with many"
            " small files"
        )
        return Row(check="files", what="small files", found=found, verdict="warning", do=do)
    return Row(check="files", what="small files", found=found)


def _large(answers: Mapping[str, Mapping]) -> Row:
    found = each((host, rate_text(a["bytes_per_second"])) for host, a in answers.items())
    slowest = min(a["bytes_per_second"] for a in answers.values())
    if slowest < SLOW_BYTES_PER_SECOND:
        minutes = CHECKPOINT_BYTES / slowest / 60
        do = f"a checkpoint of 10 GB takes {minutes:.0f} minutes: save less often, or to a faster disk"
        return Row(check="files", what="write", found=found, verdict="warning", do=do)
    return Row(check="files", what="write", found=found)
