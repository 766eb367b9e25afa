"""The digits of digits_resnet.py, enlarged to 32 x 32 pixels, and a VGG-16 of narrow layers.

shardtrain launch --islands 8 -- train examples/digits_vgg.py --strategy meshes/hetpipe.toml
"""

from dataclasses import replace

from digits_resnet import DigitsData, Images

from shardtrain import Optimizer, Run, Schedule, classification_loss
from shardtrain.models.vgg import VggConfig


class LargeDigits(DigitsData):
    """Each pixel is repeated 4 x 4 times: a VGG halves its images five times."""

    def part(self, rows: slice) -> Images:
        digits = super().part(rows)
        return replace(digits, images=digits.images.repeat(4, axis=1).repeat(4, axis=2))


def run() -> Run:
    return Run(
        model=VggConfig(depth=16, filters=4, colours=1, hidden=64),
        data=LargeDigits(),
        loss=classification_loss,
        optimizer=Optimizer(learning_rate=Schedule(peak=2e-3, warmup=20)),
        batch=64,
        steps=120,
        unit="examples",
    )
