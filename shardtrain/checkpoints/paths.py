"""Names of the folders of checkpoints: finished, partial and deleted ones. No jax.

A folder `step_00000020`, or `.part-1-of-3` of it where several writers save, got that name by one rename when
everything was in it. Next: `manifest.py`, which says what a finished folder holds.
"""

import os
import re
import shutil
from pathlib import Path

from shardtrain.checkpoints.manifest_entries import MOST_PARTS, WHOLE, WriterPart
from shardtrain.system.run_lock import LOCK

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in that of a run."""

ARRAYS = "arrays"
"""The folder inside a step's folder that Orbax writes; any Orbax program can read it."""

MANIFEST = "manifest.json"
"""The file inside a step's folder that is written last."""

PARTIAL = ".partial"
"""Suffix of a folder that is being written, or deleted."""

_STEP = "step_"
_NAME = re.compile(r"step_([0-9]{1,15})(?:\.part-([0-9]{1,5})-of-([0-9]{1,5}))?")


def step_folder(folder: Path, step: int, part: WriterPart = WHOLE) -> Path:
    """Return the folder of a step's finished checkpoint, or of a part of it.

    Examples:
        >>> step_folder(Path("runs"), 20).name, step_folder(Path("runs"), 20, WriterPart(1, 3)).name
        ('step_00000020', 'step_00000020.part-1-of-3')
    """
    return folder / f"{_STEP}{step:08d}{part}"


def partial_folder(folder: Path, step: int, part: WriterPart = WHOLE) -> Path:
    """Return the folder in which a step is written, and into which it is renamed to be deleted."""
    return folder / (step_folder(folder, step, part).name + PARTIAL)


def find_finished_steps(folder: Path) -> dict[int, dict[WriterPart, Path]]:
    """Return the folders of finished parts by step, ascending; `manifest.problems` verifies them."""
    found: dict[int, dict[WriterPart, Path]] = {}
    for path in sorted(folder.glob(f"{_STEP}*")):
        step, part = read_name(path.name)
        if step >= 0 and path == step_folder(folder, step, part):
            found.setdefault(step, {})[part] = path
    return dict(sorted(found.items()))


def read_name(name: str) -> tuple[int, WriterPart]:
    """Return the step and part that a folder is named by; (-1, WHOLE) for any other name.

    >>> read_name("step_00000020.part-1-of-3"), read_name("step_new")
    ((20, WriterPart(index=1, count=3)), (-1, WriterPart(index=0, count=1)))
    """
    match = _NAME.fullmatch(name)
    part = WriterPart(int(match[2]), int(match[3])) if match and match[2] else WHOLE
    # a count that no run has would be counted up to
    if match is None or not part.index < part.count <= MOST_PARTS:
        return -1, WHOLE
    return int(match[1]), part


def partial_folders(folder: Path) -> list[Path]:
    """Return the folders of interrupted saves and deletions, and of the save under way."""
    found = folder.glob(f"{_STEP}*{PARTIAL}")
    return sorted(path for path in found if read_name(path.name.removesuffix(PARTIAL))[0] >= 0)


def has_manifest(step_folder: Path) -> bool:
    """Return whether a folder has a manifest; nothing is read."""
    return (step_folder / MANIFEST).is_file()


def refuse_other_run(folder: Path) -> None:
    """Refuse a folder of checkpoints that is a link to that of another run, whose steps would be deleted.

    A link to another disk is followed: disks fill up.

    Raises:
      ValueError: it is such a link.
    """
    behind = folder.resolve()
    if folder.is_symlink() and behind.name == folder.name and (behind.parent / LOCK).exists():
        raise ValueError(
            f"{folder} is a link to the checkpoints of another run, which would be deleted there; remove the"
            f" link, or name that run: {behind.parent}"
        )


def delete(folder: Path) -> None:
    """Delete a step's folder, if it exists; an interrupted deletion leaves a partial folder."""
    if folder.is_symlink():
        folder.unlink()  # and nothing behind it
        return
    if not folder.exists():
        return
    partial = folder.with_name(folder.name.removesuffix(PARTIAL) + PARTIAL)
    if partial != folder:
        delete(partial)
        folder.rename(partial)
    shutil.rmtree(partial)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
