"""List the versions of installed packages from their dist-info folders, which is faster than importlib."""

import os
import re
from collections.abc import Sequence

ENDING = ".dist-info"


def list_installed_packages(search_path: Sequence[str]) -> dict[str, str]:
    """Return package -> version, sorted by name.

    Packages without a .dist-info folder, which run from their sources, are left out.

    Args:
      search_path: folders, such as `sys.path`; the first folder with a package counts.
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
