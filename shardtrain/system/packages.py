"""The versions of all installed packages, from the names of folders: importlib reads a file each."""

import os
import re
from collections.abc import Sequence

ENDING = ".dist-info"


def list_installed_packages(search_path: Sequence[str]) -> dict[str, str]:
    """Return package -> version, sorted by name.

    Packages without such a folder are left out: those that are run from their sources.

    Args:
      search_path: such as `sys.path`; the first folder that has a package counts.
    """
    found: dict[str, str] = {}
    for folder in search_path:
        for name, version in sorted(_list_in_folder(folder or ".")):
            found.setdefault(name, version)
    return dict(sorted(found.items()))


def _list_in_folder(folder: str) -> list[tuple[str, str]]:
    try:
        names = os.listdir(folder)
    except OSError:  # a zip file, or a folder that is not there
        return []
    # NAME-VERSION.dist-info; neither part has a dash
    words = [name.removesuffix(ENDING).split("-") for name in names if name.endswith(ENDING)]
    return [(re.sub(r"[-_.]+", "-", pair[0]).lower(), pair[1]) for pair in words if len(pair) == 2]
