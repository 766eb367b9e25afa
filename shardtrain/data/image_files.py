"""Train on images with labels, in folders, tar shards, Parquet, TFRecord or ArrayRecord files.

Images are decoded when they are read, with random changes for training. Next: `sources/` (formats),
`image_decoding.py`, `augmentation.py`, `batches.py`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.data.augmentation import (
    Augment,
    change_colours,
    crop_box,
    draw_mixing,
    mix_images,
    soft_label,
)
from shardtrain.data.documents import OnError, open_rows
from shardtrain.data.image_decoding import decode_image, decode_part
from shardtrain.data.samples import SplitData, find_split_problems
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile, find_files, summary
from shardtrain.data.sources.format import BadData, Record
from shardtrain.errors.field_types import too_small
from shardtrain.errors.messages import near, needs_library, refuse
from shardtrain.system.excerpts import some

IMAGE_FIELDS = ("image", "img", "jpg", "jpeg", "png", "webp", "image/encoded")
LABEL_FIELDS = ("label", "labels", "cls", "fine_label", "image/class/label")
"""Usual names of fields; the first one that a record has is read."""

BLACK, WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

FINGERPRINTED = ("paths", "classes", "size", "image", "label", "heldout_fraction", "format", "on_error")
"""Options on which the number of a sample depends."""


@dataclass(frozen=True, kw_only=True)
class ImageFiles(SplitData["ImageSource"]):
    """Train on images with labels, in folders of classes or in files of rows.

    Each image is decoded when it is read. Its shorter side is resized and its middle cropped; training images
    may be changed at random instead, depending only on seed, epoch and sample. In folders, the label of an
    image is the number of its class folder in the order of names.

    Args:
      paths: folders, files and patterns.
      classes: number of classes.
      size: height and width of an image.
      image: name of the field that has the image, in formats with fields. None means the usual names.
      label: name of the field that has the label, a whole number. None means the usual names.
      heldout_fraction: fraction of the images, drawn at random once, that is held out of training.
      format: the format of all files. None means that the format of each file is recognised.
      on_error: what happens to an image that cannot be read: stop ends the run with an error; skip counts it,
        and gives it weight 0, so that other samples keep their positions.
      augment: random changes of the training images.
      mean: subtracted from red, green and blue, each from 0 to 1; for ImageNet 0.485, 0.456, 0.406.
      std: the differences are divided by it; for ImageNet 0.229, 0.224, 0.225.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    paths: tuple[Path, ...] = ()
    classes: int
    size: int = 224
    image: str | None = None
    label: str | None = None
    heldout_fraction: float = 0.05
    format: str | None = None
    on_error: OnError = "stop"
    augment: Augment = field(default_factory=Augment)
    mean: tuple[float, float, float] = BLACK
    std: tuple[float, float, float] = WHITE

    def __post_init__(self) -> None:
        problems = find_split_problems(self) + too_small(self, classes=1, size=1)
        if not min(self.std) > 0:
            problems.append(f"std is {', '.join(f'{each:g}' for each in self.std)}; use numbers above 0")
        refuse("these images cannot be used", problems)

    def summary(self, folder: Path) -> str:
        """Return a line that says what is read."""
        train, heldout = self.split(folder)
        num_heldout = 0 if heldout is None else len(heldout)
        text = f"images: {summary(find_files(self.paths, self.format))}; {len(train):,} to train on"
        text += f", {num_heldout:,} held out"
        if damaged := train.opened.damaged:
            text += f"; skipped files that cannot be read: {some(damaged, 3)}"
        return text

    def split(self, folder: Path) -> "tuple[ImageSource, ImageSource | None]":
        """Return the training images and the held-out images; indices of files are written into `folder`.

        Raises:
          BadData: a file is damaged.
          ValueError: nothing is found, or pillow is missing.
        """
        opened = self._open(folder)
        num_images = int(opened.starts[-1])
        num_heldout = max(round(self.heldout_fraction * num_images), int(self.heldout_fraction > 0))
        if num_images <= num_heldout:
            raise ValueError(
                f"there are {num_images} images, and {num_heldout} are held out; give more, or another"
                " heldout_fraction"
            )
        # at random, as folders are sorted by class; the same ones at each start
        order = np.random.default_rng(0).permutation(num_images)
        train = ImageSource(options=self, opened=opened, samples=np.sort(order[num_heldout:]))
        if not num_heldout:
            return train, None
        unchanged = replace(self, augment=Augment())
        return train, replace(train, options=unchanged, samples=np.sort(order[:num_heldout]))

    def _open(self, folder: Path) -> "ImageRows":
        if find_spec("PIL") is None:
            raise ValueError(needs_library("images are", "pillow", "images"))
        if not self.paths:
            raise ValueError("these images have no paths; give folders, files or patterns: --data PATTERN")
        files: list[SourceFile] = []
        damaged: list[str] = []
        for file in find_files(self.paths, self.format):
            if FORMATS[file.format].whole:
                raise ValueError(
                    f"{file.path} is compressed as a whole, and images are read in random order: give them in"
                    " another format, such as tar shards"
                )
            try:
                rows = open_rows(file, folder)
                if self.on_error == "stop" and len(rows):
                    rows.read(len(rows) - 1)  # says that the file is cut off, if it is
                files.append(file)
            except BadData as error:
                if self.on_error == "stop":
                    raise
                damaged.append(f"{error.place}: {error.why}")
        return ImageRows(files, damaged, folder)


class ImageRows:
    """The rows of all files as one sequence; a process that gets a copy opens the files again.

    Args:
      files: the files.
      damaged: files that were left out, each with the reason.
      folder: the folder of the indices of files.
    """

    def __init__(self, files: Sequence[SourceFile], damaged: Sequence[str], folder: Path) -> None:
        self.files, self.damaged, self.folder = tuple(files), tuple(damaged), folder
        self.rows = [open_rows(file, folder) for file in files]
        self.starts = np.concatenate([[0], np.cumsum([len(each) for each in self.rows], dtype=np.int64)])

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageRows, (self.files, self.damaged, self.folder)


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """A random-access source of decoded images.

    Args:
      options: how images are read and decoded.
      opened: the rows of all files.
      samples: the numbers of the rows that belong to this source, int64 (n,).
      skipped_rows: the rows that this process has left out so far.
    """

    options: ImageFiles
    opened: ImageRows
    samples: np.ndarray
    skipped_rows: set[int] = field(default_factory=set, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index` for evaluation: the middle of the resized image.

        Returns:
          {"image": float32 (size, size, 3), from 0 to 1 unless `mean` and `std` change that, "label": int32
          ()}, or float32 (classes,) where labels are mixed or smoothed; with `on_error="skip"` also "weights"
          float32 (): 0 for an image that cannot be read, which is black.

        Raises:
          BadData: it cannot be read, and `on_error` is "stop".
        """
        return self._sample(index, None)

    def augmented(self, index: int, epoch: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return sample `index` for training, as `__getitem__` does, with the random changes of `augment`.

        Args:
          index: the index of the sample.
          epoch: not used, as `random` differs between epochs.
          random: draws the changes.

        Raises:
          BadData: it, or the image that it is mixed with, cannot be read, and `on_error` is "stop".
        """
        return self._sample(index, random)

    def add_skipped(self, rows: set[int]) -> None:
        """Count rows that another process has left out."""
        self.skipped_rows.update(rows)

    def _sample(self, index: int, random: np.random.Generator | None) -> dict[str, Any]:
        options, augment = self.options, self.options.augment
        found = self._read(index, random)
        image, label = found or (np.zeros((options.size, options.size, 3), np.float32), 0)
        shares = {label: 1.0}
        mixing = draw_mixing(augment, random) if random is not None and found is not None else None
        if mixing is not None and random is not None:
            other = self._read(int(random.integers(len(self))), random)
            if other is not None:  # else it stays as it is
                image, kept = mix_images(image, other[0], mixing)
                shares = {other[1]: 1 - kept}
                shares[label] = shares.get(label, 0) + kept
        if found is not None and (options.mean, options.std) != (BLACK, WHITE):
            image = (image - np.asarray(options.mean, np.float32)) / np.asarray(options.std, np.float32)
        soft = soft_label(shares, options.classes, augment.smoothing) if augment.soft_labels else None
        sample = {"image": image, "label": np.int32(label) if soft is None else soft}
        skips = options.on_error == "skip"
        return {**sample, "weights": np.float32(found is not None)} if skips else sample

    def _read(self, index: int, random: np.random.Generator | None) -> tuple[np.ndarray, int] | None:
        """Return an image before it is mixed, and its class; None if it is skipped."""
        row = int(self.samples[index])
        number = int(np.searchsorted(self.opened.starts, row, "right")) - 1
        try:
            return self._decode(number, row - int(self.opened.starts[number]), random)
        except BadData:
            if self.options.on_error == "stop":
                raise
            self.skipped_rows.add(row)
            return None

    def _decode(self, number: int, row: int, random: np.random.Generator | None) -> tuple[np.ndarray, int]:
        path, options = self.opened.files[number].path, self.options
        record = self.opened.rows[number].read(row)
        label = _read_field(record, options.label, LABEL_FIELDS, path, row, "label")
        content = _read_field(record, options.image, IMAGE_FIELDS, path, row, "image")
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
            return _make_image(content, options, random), found
        except Exception as error:
            raise BadData(place, f"its image cannot be decoded ({error})", row) from None

    @property
    def num_skipped(self) -> int | None:
        """Number of images and files that this process has left out; None means that none may be left out."""
        return len(self.skipped_rows) + len(self.opened.damaged) if self.options.on_error == "skip" else None

    @property
    def fingerprint(self) -> str:
        """A hash of the file names, their numbers of rows, the options, and the samples."""
        opened = self.opened
        files = [(file.path.name, len(rows)) for file, rows in zip(opened.files, opened.rows, strict=True)]
        # what changes an image leaves the position of all samples as it is
        values = {**vars(self.options), "paths": (), "on_error": "stop"}
        options = f"ImageFiles({', '.join(f'{name}={values[name]!r}' for name in FINGERPRINTED)})"
        part = (len(self.samples), int(self.samples[0]) if len(self.samples) else -1)
        return hashlib.sha256(f"({files!r}, {options}, {part!r})".encode()).hexdigest()[:16]


def _make_image(content: bytes, options: ImageFiles, random: np.random.Generator | None) -> np.ndarray:
    """Decode an image for evaluation, or with random changes for training."""
    augment = options.augment
    if random is None:
        return decode_image(content, options.size)
    if (areas := augment.crop) is None:
        image = decode_image(content, options.size)
    else:
        image = decode_part(content, options.size, lambda *sides: crop_box(sides, areas, random))
    return change_colours(image, augment, random)


def _read_field(
    record: Record, asked: str | None, usual: Sequence[str], path: Path, row: int, option: str
) -> Any:
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
