"""Real images without a download: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, and a small ResNet.

shardtrain train examples/digits_resnet.py
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain import Optimizer, Run, Schedule, classification_loss
from shardtrain.models.resnet import ResNetConfig


@dataclass(frozen=True, kw_only=True)
class Images:
    """Grey images (8, 8, 1) from 0 to 1, and the digits that they show."""

    images: np.ndarray
    digits: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": self.digits[index]}


@dataclass(frozen=True, kw_only=True)
class DigitsData:
    """The digits in their original order, by writer: the held-out ones are by other writers."""

    num_heldout: int = 297

    def train(self, folder: Path) -> Images:
        return self.part(slice(None, -self.num_heldout))

    def heldout(self, folder: Path) -> Images:
        return self.part(slice(-self.num_heldout, None))

    def part(self, rows: slice) -> Images:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}; the digits come with it: uv pip install scikit-learn") from error
        digits: Any = load_digits()
        images = (digits.images[rows, ..., None] / 16).astype(np.float32)
        return Images(images=images, digits=digits.target[rows].astype(np.int32))


def run() -> Run:
    return Run(
        model=ResNetConfig(depth=20, filters=8, height=8, width=8, colours=1, classes=10),
        data=DigitsData(),
        loss=classification_loss,
        optimizer=Optimizer(learning_rate=Schedule(peak=3e-3, warmup=20)),
        batch=64,
        steps=200,
        unit="examples",
    )
