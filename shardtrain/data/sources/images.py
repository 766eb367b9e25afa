"""A folder of images: its folders are the classes, in the order of their names."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardtrain.data.sources.format import BadData, Format, Record, iterate_rows
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.untrusted_data import parse_record
from shardtrain.system.untrusted_files import name_problem, read_bytes, read_text

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
OWNER_ONLY = 0o600


class ImageFolder:
    """The images below a folder, each with the number of its class; or a single image without one."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self._path = path if path.is_dir() else path.parent
        self._names = image_names(path, folder) if path.is_dir() else [path.name]
        classes = sorted({name.partition("/")[0] for name in self._names if "/" in name})
        self._labels = {name: number for number, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self._names)

    def read(self, row: int) -> Record:
        name = self._names[row]
        first, in_class, _ = name.partition("/")
        label = {"label": self._labels[first], "class": first} if in_class else {}
        try:
            return {"image": read_bytes(self._path / name), "name": name, **label}
        except (OSError, ValueError) as error:
            raise BadData(self._path / name, f"it cannot be read ({error})", row) from None

    def iterate(self, start: int, stop: int | None) -> Iterator[tuple[int, Record | BadData]]:
        return iterate_rows(self, start, stop)


def image_names(path: Path, folder: Path | None) -> list[str]:
    """Return the names of all images below a folder, sorted; from a list that an earlier call wrote.

    The list is used again while no folder in it has another time of modification.

    Args:
      path: the folder of the images.
      folder: the folder of the list; None writes none.
    """
    index = None if folder is None else folder / f"images-{_digest(path)}.json"
    if index is not None and (names := _read_index(path, index)) is not None:
        return names
    names, times = [], {}
    for root, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        times[os.path.relpath(root, path)] = os.stat(root).st_mtime_ns
        inside = Path(root).relative_to(path)
        names += [
            (inside / name).as_posix()
            for name in files
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    names.sort()
    if index is not None and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(index, json.dumps({"times": times, "names": names}).encode(), OWNER_ONLY)
    return names


def _read_index(path: Path, index: Path) -> list[str] | None:
    try:
        found: dict[str, Any] = parse_record(read_text(index))
        times: dict[str, int] = found["times"]
        names: list[str] = found["names"]
        if any(name_problem(name) for name in [*names, *(name for name in times if name != ".")]):
            return None
        same = all(os.stat(path / name).st_mtime_ns == time for name, time in times.items())
        return names if same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:24]


FORMAT = Format(summary="folders of images, one folder for each class", suffixes=SUFFIXES, rows=ImageFolder)
