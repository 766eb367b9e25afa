"""Read a folder of images; its subfolders are the classes, in the order of their names."""

import os
from pathlib import Path

from shardtrain.data.sources.format import BadData, Format, Record, Rows
from shardtrain.system.untrusted_files import read_bytes

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


class ImageFolder(Rows):
    """The images of a folder, each with the number of its class; or a single image without a class."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self._path = path if path.is_dir() else path.parent
        self._names = image_names(path) if path.is_dir() else [path.name]
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


def image_names(path: Path) -> list[str]:
    """Return the names of all images in a folder and its subfolders, sorted; hidden names are skipped."""
    names: list[str] = []
    for root, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(root).relative_to(path)
        names += [
            (inside / name).as_posix()
            for name in files
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    return sorted(names)


FORMAT = Format(summary="folders of images, one folder for each class", suffixes=SUFFIXES, rows=ImageFolder)
