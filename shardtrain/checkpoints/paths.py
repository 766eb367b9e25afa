"""Name, find and delete the folders of checkpoints. No jax.

A folder gets its name `step_00000020`, or `step_00000020.part-1-of-3` of several writers, by one rename when
it is complete. Next: `manifest.py`, which describes a finished folder.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from shardtrain.checkpoints.manifest_entries import MOST_PARTS, WHOLE, WriterPart
from shardtrain.system.atomic_write import take_away
from shardtrain.system.run_lock import LOCK

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints inside a run's folder."""

ARRAYS = "arrays"
"""Folder inside a step's folder that Orbax writes; any Orbax program can read it."""

MANIFEST = "manifest.json"
"""File inside a step's folder that is written last."""

PARTIAL = ".partial"
"""Suffix of a folder that is being written or deleted."""

_STEP = "step_"
_NAME = re.compile(r"step_([0-9]{1,15})(?:\.part-([0-9]{1,5})-of-([0-9]{1,5}))?")
_BY = ".by-"
"""In the name of what is being written, before the name of the writer if several processes may save a run."""


def step_folder(folder: Path, step: int, part: WriterPart = WHOLE) -> Path:
    """Return the folder of a step's finished checkpoint, or of a part of it.

    Examples:
        >>> step_folder(Path("runs"), 20).name, step_folder(Path("runs"), 20, WriterPart(1, 3)).name
        ('step_00000020', 'step_00000020.part-1-of-3')
    """
    return folder / f"{_STEP}{step:08d}{part}"


def partial_folder(folder: Path, step: int, part: WriterPart = WHOLE, writer: str = "") -> Path:
    """Return the folder in which a step is written; without a writer, the one of its deletion too.

    Examples:
        >>> partial_folder(Path("runs"), 20, writer="a").name
        'step_00000020.by-a.partial'
    """
    return partial_path(step_folder(folder, step, part), writer)


def partial_path(final: Path, writer: str) -> Path:
    """Return the path under which a writer, or "" for the only one, writes what gets a final path."""
    return final.with_name(f"{final.name}{_BY if writer else ''}{writer}{PARTIAL}")


def find_finished_steps(folder: Path) -> dict[int, dict[WriterPart, Path]]:
    """Return the folders of finished parts by step, ascending; `manifest.problems` verifies them."""
    found: dict[int, dict[WriterPart, Path]] = {}
    for path in sorted(folder.glob(f"{_STEP}*")):
        step, part = read_name(path.name)
        if step >= 0 and path == step_folder(folder, step, part):
            found.setdefault(step, {})[part] = path
    return dict(sorted(found.items()))


def read_name(name: str) -> tuple[int, WriterPart]:
    """Parse the name of a finished folder as step and part; (-1, WHOLE) for any other name.

    >>> read_name("step_00000020.part-1-of-3"), read_name("step_new")
    ((20, WriterPart(index=1, count=3)), (-1, WriterPart(index=0, count=1)))
    """
    match = _NAME.fullmatch(name)
    part = WriterPart(int(match[2]), int(match[3])) if match and match[2] else WHOLE
    # a huge count would be looped over
    if match is None or not part.index < part.count <= MOST_PARTS:
        return -1, WHOLE
    return int(match[1]), part


def read_partial_name(name: str) -> tuple[int, WriterPart]:
    """Parse the name of a folder that is being written or deleted, as `read_name` does a finished one's.

    >>> read_partial_name("step_00000020.by-a.partial")
    (20, WriterPart(index=0, count=1))
    """
    return read_name(name.removesuffix(PARTIAL).partition(_BY)[0])


def partial_folders(folder: Path, writer: str = "") -> list[Path]:
    """Return the folders of interrupted saves and deletions, and of running saves.

    Args:
        folder: folder of the checkpoints.
        writer: leave out the saves of other writers; "" lists all.
    """
    found = folder.glob(f"{_STEP}*{PARTIAL}")
    found = (path for path in found if read_partial_name(path.name)[0] >= 0)
    own = ("", writer + PARTIAL)
    return sorted(path for path in found if not writer or path.name.partition(_BY)[2] in own)


def revoke_unfinished(folder: Path, writer: str, select: Callable[[set[str]], set[str]]) -> None:
    """Delete what some writers have not finished; none of it can get its final name after this.

    A save becomes a checkpoint by the renaming of its folder, which fails if the folder is gone. So does the
    file of evaluations.

    Args:
        folder: folder of the checkpoints.
        writer: name of the writer that takes over.
        select: names of writers with unfinished saves -> those from whom it takes over.
    """
    if folder.exists():
        os.utime(folder)  # a network file system then lists what its server has
    unfinished = folder.glob(f"*{_BY}*{PARTIAL}")
    found = {path: path.name.removesuffix(PARTIAL).partition(_BY)[2] for path in unfinished}
    revoked = select(set(found.values()) - {writer})
    take_away([path for path, by in found.items() if by in revoked], folder / f".old.{writer}")


def has_manifest(step_folder: Path) -> bool:
    """Return whether a folder has a manifest, without reading it."""
    return (step_folder / MANIFEST).is_file()


def refuse_other_run(folder: Path) -> None:
    """Refuse a folder of checkpoints that is a link to another run's, whose steps would be deleted.

    A link to a folder on another disk is allowed.

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
        folder.unlink()  # not its target
        return
    if not folder.exists():
        return
    partial = folder.with_name(folder.name.removesuffix(PARTIAL) + PARTIAL)
    if partial != folder:
        delete(partial)
        folder.rename(partial)
    shutil.rmtree(partial)
