"""Images with labels by number, decoded when they are read, changed at random for training.

Next: `image_files.py`, the options; `image_decoding.py`; `augmentation.py`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtrain.data.augmentation import changed_colours, crop_box, draw_mixing, mixed, soft_label
from shardtrain.data.documents import open_rows
from shardtrain.data.image_decoding import decode_image, decode_part
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData, Record, Rows
from shardtrain.errors.messages import near

if TYPE_CHECKING:
    from shardtrain.data.image_files import ImageFiles

IMAGE_FIELDS = ("image", "img", "jpg", "jpeg", "png", "webp", "image/encoded")
LABEL_FIELDS = ("label", "labels", "cls", "fine_label", "image/class/label")
"""Fields of formats and data sets, the first one that a record has counts."""

BLACK, WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

FINGERPRINTED = (
    "paths", "classes", "size", "image", "label", "heldout_fraction", "format", "on_error",
)  # fmt: skip
"""Options that decide which sample has which number."""


class Opened:
    """Files of rows as one sequence; another process, which gets a copy, opens them again.

    Args:
      files: the files.
      rows: of each.
      damaged: files that were left out, each with the reason.
      folder: the folder of their indices.

    Attributes:
      paths: of the files.
      starts: the number of rows before each file, and of all, int64 (files + 1,).
    """

    def __init__(
        self, files: Sequence[SourceFile], rows: Sequence[Rows], damaged: Sequence[str], folder: Path
    ) -> None:
        self.files, self.rows, self.damaged, self.folder = tuple(files), rows, tuple(damaged), folder
        self.paths = [file.path for file in files]
        self.starts = np.concatenate([[0], np.cumsum([len(each) for each in rows], dtype=np.int64)])

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (self.files, self.damaged, self.folder)


def reopened(files: Sequence[SourceFile], damaged: Sequence[str], folder: Path) -> Opened:
    """Open files again that could be opened before.

    Raises:
      BadData: one of them cannot be read any more.
    """
    return Opened(files, [open_rows(file, folder) for file in files], damaged, folder)


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
        """Return sample `index`, as evaluation sees it: resized, and the middle.

        Returns:
          {"image": float32 (size, size, 3), from 0 to 1 unless `mean` and `std` change that, "label": int32
          ()}, or float32 (classes,) where labels are mixed or smoothed; with `on_error="skip"` also "weights"
          float32 (): 0 for an image that cannot be read, which is black.

        Raises:
          BadData: it cannot be read, and `on_error` is "stop".
        """
        return self._sample(index, None)

    def augmented(self, index: int, epoch: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return sample `index` for training, changed as `augment` says.

        Args:
          index: of the sample.
          epoch: not needed, as the draws of each epoch are others.
          random: draws the changes.

        Returns:
          As `__getitem__`.

        Raises:
          BadData: it, or the image that it is mixed with, cannot be read, and `on_error` is "stop".
        """
        return self._sample(index, random)

    @property
    def skipped_rows(self) -> set[int]:
        """The rows that this process has left out so far."""
        return set(self._skipped)

    def add_skipped(self, rows: set[int]) -> None:
        """Count rows that another process has left out."""
        self._skipped.update(rows)

    def _sample(self, index: int, random: np.random.Generator | None) -> dict[str, Any]:
        options, augment = self.options, self.options.augment
        found = self._read(index, random)
        image, label = found or (np.zeros((options.size, options.size, 3), np.float32), 0)
        shares = {label: 1.0}
        mixing = draw_mixing(augment, random) if random is not None and found is not None else None
        if mixing is not None and random is not None:
            other = self._read(int(random.integers(len(self))), random)
            if other is not None:  # else it stays as it is
                image, kept = mixed(image, other[0], mixing)
                shares = {other[1]: 1 - kept}
                shares[label] = shares.get(label, 0) + kept
        if found is not None and (options.mean, options.std) != (BLACK, WHITE):
            image = (image - np.asarray(options.mean, np.float32)) / np.asarray(options.std, np.float32)
        soft = soft_label(shares, options.classes, augment.smoothing) if augment.soft_labels else None
        sample = {"image": image, "label": np.int32(label) if soft is None else soft}
        skips = options.on_error == "skip"
        return {**sample, "weights": np.float32(found is not None)} if skips else sample

    def _read(self, index: int, random: np.random.Generator | None) -> tuple[np.ndarray, int] | None:
        """Return an image, changed by itself, and its class; None for one that is skipped."""
        row = int(self.samples[index])
        number = int(np.searchsorted(self.opened.starts, row, "right")) - 1
        try:
            return self._decoded(number, row - int(self.opened.starts[number]), random)
        except BadData:
            if self.options.on_error == "stop":
                raise
            self._skipped.add(row)
            return None

    def _decoded(self, number: int, row: int, random: np.random.Generator | None) -> tuple[np.ndarray, int]:
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
            return _image(content, options, random), found
        except Exception as error:
            raise BadData(place, f"its image cannot be decoded ({error})", row) from None

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
        # as earlier versions wrote it; what changes an image leaves the position of all samples as it is
        values = {**vars(self.options), "paths": (), "on_error": "stop"}
        options = f"ImageFiles({', '.join(f'{name}={values[name]!r}' for name in FINGERPRINTED)})"
        part = (len(self.samples), int(self.samples[0]) if len(self.samples) else -1)
        return hashlib.sha256(f"({files!r}, {options}, {part!r})".encode()).hexdigest()[:16]


def _image(content: bytes, options: "ImageFiles", random: np.random.Generator | None) -> np.ndarray:
    """Decode an image, for evaluation, or with random changes."""
    augment = options.augment
    if random is None:
        return decode_image(content, options.size)
    if (areas := augment.crop) is None:
        image = decode_image(content, options.size)
    else:
        image = decode_part(content, options.size, lambda *sides: crop_box(sides, areas, random))
    return changed_colours(image, augment, random)


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
