"""Images with labels as the data of a run: folders, tar shards, Parquet, TFRecord, ArrayRecord.

Next: `image_source.py`, the samples; `sources/`, the formats; `batches.py`.
"""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from shardtrain.data.augmentation import Augment
from shardtrain.data.documents import OnError, open_rows
from shardtrain.data.image_source import BLACK, WHITE, ImageSource, Opened
from shardtrain.data.sources import FORMATS
from shardtrain.data.sources.find import SourceFile, find_files, summary
from shardtrain.data.sources.format import BadData, Rows
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error
from shardtrain.system.excerpts import some


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """The data of a run: images with labels, in folders of classes or in files of rows.

    Each image is decoded when it is read, its shorter side resized, and the middle cropped; those to train on
    may be changed at random instead, and a change depends on seed, epoch and sample alone. In a folder the
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
      augment: random changes of the images to train on.
      mean: subtracted from the red, green and blue of each pixel, which are 0 to 1 before; of ImageNet 0.485,
        0.456, 0.406.
      std: what they are divided by then; of ImageNet 0.229, 0.224, 0.225.

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
        problems = wrong_types(self)
        problems += [
            f"{name} is {value}; use 1 or more"
            for name in ("classes", "size")
            if isinstance(value := getattr(self, name), int) and value < 1
        ]
        if not 0 <= self.heldout_fraction < 1:
            problems.append(f"heldout_fraction is {self.heldout_fraction}; use 0 or more, below 1")
        if not min(self.std) > 0:
            problems.append(f"std is {', '.join(f'{each:g}' for each in self.std)}; use numbers above 0")
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
        if not num_heldout:
            return train, None
        unchanged = replace(self, augment=Augment())
        return train, replace(train, options=unchanged, samples=np.sort(order[:num_heldout]))

    def _open(self, folder: Path) -> Opened:
        if find_spec("PIL") is None:
            raise ValueError(
                "images are read by the library pillow: install it with uv sync --extra images in a clone,"
                " elsewhere with pip install 'path/to/shardtrain[images]'"
            )
        if not self.paths:
            raise ValueError("these images have no paths; give folders, files or patterns: --data PATTERN")
        files: list[SourceFile] = []
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
                files.append(file)
            except BadData as error:
                if self.on_error == "stop":
                    raise
                damaged.append(f"{error.place}: {error.why}")
        return Opened(files, rows, damaged, folder)
