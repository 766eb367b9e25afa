"""Find the text files of a run: named files, folders searched in order, or Python's standard library.

Next: `text.py`, which packs them.
"""

import sysconfig
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from shardtrain.data.sources.find import walk_files
from shardtrain.errors.messages import refuse
from shardtrain.system.excerpts import some

EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "encodings",
}
"""Folders of the standard library that are excluded: installed packages, tests, tables of numbers."""


class Found(NamedTuple):
    """The files that `Text` reads, in its order, text or not, and the folders that it does not search."""

    files: list[Path]
    left_out: tuple[str, ...]


def find_texts(paths: Sequence[Path], folder: Path) -> Found:
    """Find the files that `Text` reads.

    Args:
      paths: files and folders; none is the standard library.
      folder: a folder that is not searched, as it holds files of the run.

    Raises:
      ValueError: lists every path that does not exist or has no files with content.
    """
    library = Path(sysconfig.get_path("stdlib"))
    if not paths:
        files = _walk(library, folder, EXCLUDED_FOLDERS).files
        return Found([file for file in files if file.suffix == ".py" and file.stat().st_size], ())
    files, left_out, problems = [], [], []
    for path in map(Path, paths):
        found = _walk(path, folder) if path.is_dir() else Found([path] if path.is_file() else [], ())
        filled = [file for file in found.files if file.stat().st_size]
        files += filled
        left_out += found.left_out
        if not filled:
            why = f"holds nothing to read outside {folder}" if path.is_dir() else "is not there, or empty"
            why += f" (not entered: {some(found.left_out, 3)})" if found.left_out else ""
            problems.append(f"{path.absolute()} {why}; give a text file or a folder of them")
    refuse("this text cannot be read", problems)
    return Found(files, tuple(left_out))


def _walk(path: Path, excluded_folder: Path, excluded_names: Set[str] = frozenset()) -> Found:
    files: list[Path] = []
    left_out: list[str] = []
    for root, folders, found in walk_files(path, left_out.append, lambda name: name not in excluded_names):
        if root.resolve() == excluded_folder.resolve():
            folders.clear()
        else:
            files += found
    return Found(files, tuple(left_out))
