"""Walk the folders below one, in the order of names, and say which are not entered."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def walk_files(
    folder: Path, left_out: Callable[[str], None], enter: Callable[[str], bool]
) -> Iterator[tuple[Path, list[str], list[Path]]]:
    """Yield (a folder, names of folders in it, paths of regular files in it), as `os.walk`, sorted.

    Hidden names are skipped, as is what is no regular file: a FIFO would block. Who iterates may clear the
    names of folders, and none of them is entered.

    Args:
      folder: where to begin.
      left_out: called with each folder that is not entered, and why: it is a link, or cannot be read. A link
        might lead in a circle, or to files that are not meant for training.
      enter: name of a folder -> whether to enter it; those that are not are not reported.
    """

    def unreadable(error: OSError) -> None:
        left_out(f"{error.filename} ({error.strerror})")

    for name, folders, names in os.walk(folder, onerror=unreadable):
        root = Path(name)
        folders[:] = sorted(each for each in folders if not each.startswith(".") and enter(each))
        try:
            files = [root / each for each in sorted(names) if not each.startswith(".")]
            files = [file for file in files if file.is_file()]
        except OSError as error:
            unreadable(error)
            continue
        yield root, folders, files
        for each in folders:
            if (root / each).is_symlink():
                left_out(f"{root / each} (a link; name {(root / each).resolve()} itself)")
