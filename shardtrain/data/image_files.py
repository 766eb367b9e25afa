"""Images with labels as the data of a run: folders, tar shards, Parquet, TFRecord, ArrayRecord.

Pillow decodes, in `decode_image` alone. Next: `sources/` (the formats), `batches.py`.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardtrain.data.documents import OnError, on_error_problems, open_rows
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import find_files, summary
from shardtrain.data.sources.format import BadData, Record, Rows
from shardtrain.errors.messages import near, problems_error
from shardtrain.system.excerpts import some

IMAGE_FIELDS = ("image", "img", "jpg", "jpeg", "png", "webp", "image/encoded")
LABEL_FIELDS = ("label", "labels", "cls", "fine_label", "image/class/label")
"""Fields of formats and data sets, the first one that a record has counts."""

RESIZE = 256 / 224
"""The shorter side before the crop, as a part of the size: what most evaluations on ImageNet take."""


class Opened(NamedTuple):
    """Files of rows as one sequence.

    Attributes:
      paths: of the files.
      rows: of each.
      starts: the number of rows before each file, and of all, int64 (files + 1,).
      damaged: files that were left out, each with the reason.
    """

    paths: list[Path]
    rows: list[Rows]
    starts: np.ndarray
    damaged: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """A random-access source of decoded images.

    Args:
      options: how images are found in a row, and decoded.
      opened: the files.
      samples: the numbers of the rows that belong to it, int64 (n,).
    """

    options: "ImageFiles"
    opened: Opened
    samples: np.ndarray
    _skipped: set[int] = field(default_factory=set, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"image": float32 (size, size, 3) from 0 to 1, "label": int32 ()}; with `on_error="skip"` also
          "weights" float32 (): 0 for an image that cannot be read, which is black.

        Raises:
          BadData: it cannot be read, and `on_error` is "stop".
        """
        row, size = int(self.samples[index]), self.options.size
        number = int(np.searchsorted(self.opened.starts, row, "right")) - 1
        skips = self.options.on_error == "skip"
        try:
            sample = self._sample(number, row - int(self.opened.starts[number]))
        except BadData:
            if not skips:
                raise
            self._skipped.add(row)
            return {
                "image": np.zeros((size, size, 3), np.float32),
                "label": np.int32(0),
                "weights": np.float32(0),
            }  # type: ignore[return-value]
        return {**sample, "weights": np.float32(1)} if skips else sample  # type: ignore[dict-item]

    def _sample(self, number: int, row: int) -> dict[str, Any]:
        path, options = self.opened.paths[number], self.options
        record = self.opened.rows[number].read(row)
        label = _field(record, options.label, LABEL_FIELDS, path, row, "label")
        content = _field(record, options.image, IMAGE_FIELDS, path, row, "image")
        content = content.get("bytes") if isinstance(content, dict) else content  # as `datasets` stores it
        if not isinstance(content, bytes):
            raise BadData(path, f"its image is {type(content).__name__}, not the bytes of a file", row)
        place = path / record["name"] if path.is_dir() else path
        try:
            found = int(np.asarray(label).reshape(()))
        except (TypeError, ValueError):
            raise BadData(place, f"its label is {label!r:.40}, not a whole number", row) from None
        if not 0 <= found < options.classes:
            raise BadData(place, f"its label is {found}, and classes are 0 to {options.classes - 1}", row)
        try:
            image = decode_image(content, options.size)
        except Exception as error:
            raise BadData(place, f"its image cannot be decoded ({error})", row) from None
        return {"image": image, "label": np.int32(found)}

    @property
    def num_skipped(self) -> int | None:
        """How many images and files this process has left out so far; None: none may be."""
        return len(self._skipped) + len(self.opened.damaged) if self.options.on_error == "skip" else None

    @property
    def fingerprint(self) -> str:
        """A hash of the names and numbers of rows of all files, of the options, and of the part."""
        files = [
            (path.name, len(rows)) for path, rows in zip(self.opened.paths, self.opened.rows, strict=True)
        ]
        options = replace(self.options, paths=(), on_error="stop")
        part = (len(self.samples), int(self.samples[0]) if len(self.samples) else -1)
        return hashlib.sha256(repr((files, options, part)).encode()).hexdigest()[:16]


def decode_image(content: bytes, size: int) -> np.ndarray:
    """Decode an image, resize its shorter side, and crop the middle.

    Args:
      content: a JPEG, PNG or another file that pillow reads.
      size: height and width of the result.

    Returns:
      float32 (size, size, 3), from 0 to 1.

    Raises:
      OSError, ValueError: it is damaged.
    """
    pillow = import_module("PIL.Image")
    with pillow.open(io.BytesIO(content)) as file:
        image = file.convert("RGB")
    scale = round(size * RESIZE) / min(image.size) if min(image.size) > size else size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), pillow.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float32)
    return pixels / np.float32(255)


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """The data of a run: images with labels, in folders of classes or in files of rows.

    Each image is decoded when it is read, its shorter side resized, and the middle cropped. In a folder the
    label is the number of the class's folder, in the order of names.

    Args:
      paths: folders, files and patterns.
      classes: number of classes.
      size: height and width of an image.
      image: the field with the image, of formats with fields; None: the usual names.
      label: the field with the label, a whole number; None: the usual names.
      heldout_fraction: fraction of the images, drawn at random once, that is held out of training.
      format: the format of all files; None recognises each.
      on_error: what to do with an image that cannot be read: stop, or skip it: it gets weight 0, so the
        position of all others stays, and is counted.

    Raises:
      ValueError: lists every value that is out of range.
    """

    paths: tuple[Path, ...] = ()
    classes: int
    size: int = 224
    image: str | None = None
    label: str | None = None
    heldout_fraction: float = 0.05
    format: str | None = None
    on_error: OnError = "stop"

    def __post_init__(self) -> None:
        problems = on_error_problems(self.on_error)
        problems += [
            f"{name} is {value}; use 1 or more"
            for name in ("classes", "size")
            if (value := getattr(self, name)) < 1
        ]
        if not 0 <= self.heldout_fraction < 1:
            problems.append(f"heldout_fraction is {self.heldout_fraction}; use 0 or more, below 1")
        if isinstance(self.paths, str | Path):
            problems.append(f"paths is one path; write paths=({str(self.paths)!r},)")
        if problems:
            raise problems_error("these images cannot be used", problems)

    def train(self, folder: Path) -> ImageSource:
        """Return the images to train on.

        Args:
          folder: the folder of the run, for indices of files.

        Raises:
          BadData: a file is damaged.
          ValueError: nothing is found, or pillow is missing.
        """
        return self._parts(folder)[0]

    def heldout(self, folder: Path) -> ImageSource | None:
        """Return the held-out images; None if nothing is held out."""
        return self._parts(folder)[1]

    def summary(self, folder: Path) -> str:
        """Return a line with what is read."""
        train, heldout = self._parts(folder)
        num_heldout = 0 if heldout is None else len(heldout)
        text = f"images: {summary(find_files(self.paths, self.format))}; {len(train):,} to train on"
        text += f", {num_heldout:,} held out"
        if damaged := train.opened.damaged:
            text += f"; skipped files that cannot be read: {some(damaged, 3)}"
        return text

    def _parts(self, folder: Path) -> tuple[ImageSource, ImageSource | None]:
        opened = self._open(folder)
        num_images = int(opened.starts[-1])
        num_heldout = round(self.heldout_fraction * num_images)
        if self.heldout_fraction > 0:
            num_heldout = max(1, num_heldout)
        if num_images <= num_heldout:
            raise ValueError(
                f"there are {num_images} images, and {num_heldout} are held out; give more, or another"
                " heldout_fraction"
            )
        # at random, as folders are sorted by class; the same ones at each start
        order = np.random.default_rng(0).permutation(num_images)
        train = ImageSource(options=self, opened=opened, samples=np.sort(order[num_heldout:]))
        return train, replace(train, samples=np.sort(order[:num_heldout])) if num_heldout else None

    def _open(self, folder: Path) -> Opened:
        if find_spec("PIL") is None:
            raise ValueError(
                "images are read by the library pillow: install it with uv sync --extra images in a clone,"
                " elsewhere with pip install 'path/to/shardtrain[images]'"
            )
        if not self.paths:
            raise ValueError("these images have no paths; give folders, files or patterns: --data PATTERN")
        paths: list[Path] = []
        rows: list[Rows] = []
        damaged: list[str] = []
        for file in find_files(self.paths, self.format):
            if FORMATS[file.format].whole:
                raise ValueError(
                    f"{file.path} is compressed as a whole, and images are read in random order: give them in"
                    " another format, such as tar shards"
                )
            try:
                opened = open_rows(file, folder)
                if self.on_error == "stop" and len(opened):
                    opened.read(len(opened) - 1)  # says that the file is cut off, if it is
                rows.append(opened)
                paths.append(file.path)
            except BadData as error:
                if self.on_error == "stop":
                    raise
                damaged.append(f"{error.place}: {error.why}")
        starts = np.concatenate([[0], np.cumsum([len(each) for each in rows], dtype=np.int64)])
        return Opened(paths, rows, starts, tuple(damaged))


def _field(record: Record, asked: str | None, usual: Sequence[str], path: Path, row: int, option: str) -> Any:
    """Return the value of a field.

    Raises:
      BadData: the record has no such field.
    """
    names = usual if asked is None else (asked,)
    found = next((name for name in names if record.get(name) is not None), None)
    if found is None:
        wanted = (
            f"none of the fields {', '.join(usual)}" if asked is None else f"no field {near(asked, record)}"
        )
        has = f" (it has {', '.join(record)})" if asked is None else ""
        raise BadData(path, f"it has {wanted}{has}; name it: --data.{option}", row)
    return record[found]
