"""Data of one's own: anything with a length and samples by number; here for the MLP of `models/`.

shardtrain train examples/own_data.py
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain import Optimizer, Run, Schedule, classification_loss
from shardtrain.models.mlp import MlpConfig


class Spirals:
    """Points of three spiral arms; which arm is the label. Sample i is always the same point."""

    def __init__(self, first: int, num_samples: int):
        self.first, self.num_samples = first, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng(self.first + index)
        arm, radius = random.integers(3), random.uniform(0.1, 1)
        angle = 2 * np.pi * (arm / 3 + radius) + 0.1 * random.standard_normal()
        waves = np.outer((radius * np.cos(angle), radius * np.sin(angle)), 2.0 ** np.arange(4)).ravel()
        image = np.concatenate([np.cos(waves), np.sin(waves)]).astype(np.float32)
        return {"image": image, "label": np.int32(arm)}


@dataclass(frozen=True, kw_only=True)
class SpiralData:
    """The data of a run: a source to train on, and a held-out one."""

    num_samples: int = 5000

    def train(self, folder: Path) -> Spirals:
        return Spirals(0, self.num_samples)

    def heldout(self, folder: Path) -> Spirals:
        return Spirals(self.num_samples, 500)


def run() -> Run:
    return Run(
        model=MlpConfig(features=16, mlp=64, num_layers=2, classes=3),
        data=SpiralData(),
        loss=classification_loss,
        optimizer=Optimizer(learning_rate=Schedule(peak=3e-3, warmup=20)),
        batch=64,
        steps=300,
        unit="examples",
    )
