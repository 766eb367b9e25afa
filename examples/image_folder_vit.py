r"""A vision transformer on a folder of images, with augmentation; without a folder, shapes are drawn first.

shardtrain train examples/image_folder_vit.py
shardtrain train examples/image_folder_vit.py --data.images.paths birds/ --data.images.classes 9 \
    --model.classes 9
shardtrain train examples/image_folder_vit.py:resnet
"""

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardtrain import (
    Augment,
    ImageFiles,
    Optimizer,
    Run,
    Schedule,
    TopAccuracy,
    add_metrics,
    classification_loss,
)
from shardtrain.models.imagenet_resnet import ImageNetResNetConfig
from shardtrain.models.vit import VitConfig

SHAPES = ("circle", "cross", "ring", "square", "triangle")


def draw(shape: str, random: np.random.Generator) -> np.ndarray:
    """Draw a shape of any place, size and colours, uint8 (32, 32, 3)."""
    y, x = (np.mgrid[:32, :32] - random.uniform(12, 20, (2, 1, 1))) / random.uniform(7, 11)
    inside = {
        "circle": np.hypot(x, y) < 0.9,
        "cross": (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 1),
        "ring": abs(np.hypot(x, y) - 0.8) < 0.2,
        "square": np.maximum(abs(x), abs(y)) < 0.8,
        "triangle": (abs(x) < (y + 1) / 2) & (y < 0.9),
    }[shape]
    ground, colour = random.uniform(0, 100, 3), random.uniform(150, 255, 3)
    pixels = np.where(inside[..., None], colour, ground) + random.normal(0, 5, (32, 32, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def drawn(folder: Path, num_each: int) -> Path:
    """Return a folder of JPEG files, one folder for each shape; it is drawn where it is not there."""
    if not (folder / "shapes").exists():
        folder.mkdir(parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(dir=folder))
        for number, shape in enumerate(SHAPES):
            (begun / shape).mkdir()
            for i in range(num_each):
                image = Image.fromarray(draw(shape, np.random.default_rng((number, i))))
                image.save(begun / shape / f"{i:04}.jpg", quality=90)
        try:  # another rank may have been faster
            os.rename(begun, folder / "shapes")
        except OSError:
            shutil.rmtree(begun)
    return folder / "shapes"


@dataclass(frozen=True, kw_only=True)
class FolderOrShapes:
    """Images of a folder, or shapes that are drawn in the run's folder.

    Args:
      images: the folder, and how its images are read.
      num_each: number of images drawn of each shape, where no folder is given.
    """

    images: ImageFiles
    num_each: int = 200

    def train(self, folder: Path) -> Any:
        return self.found(folder).train(folder)

    def heldout(self, folder: Path) -> Any:
        return self.found(folder).heldout(folder)

    def found(self, folder: Path) -> ImageFiles:
        return (
            self.images if self.images.paths else replace(self.images, paths=(drawn(folder, self.num_each),))
        )


def run() -> Run:
    augment = Augment(crop=(0.6, 1.0), flip=True, brightness=0.2, mixup=0.2, mixed=0.3)
    images = ImageFiles(
        classes=len(SHAPES),
        size=24,
        heldout_fraction=0.1,
        augment=augment,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )
    return Run(
        model=VitConfig(
            height=24, width=24, classes=len(SHAPES), patch=4, embed=64, num_layers=3, num_heads=4
        ),
        data=FolderOrShapes(images=images),
        loss=add_metrics(classification_loss, top2=TopAccuracy(2)),
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=3e-3, warmup=20), weight_decay=0.05),
        batch=50,
        steps=200,
        unit="examples",
    )


def resnet() -> Run:
    """The same with a narrow ResNet-50."""
    model = ImageNetResNetConfig(
        depth=50, filters=8, norm="group", num_groups=4, height=24, width=24, classes=len(SHAPES)
    )
    return replace(run(), model=model)
