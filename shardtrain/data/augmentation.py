"""Augment training images at random: crops, flips, colours, mixtures of two images and their labels.

The functions take a numpy random generator, so that a change depends only on seed, epoch and sample.
`image_files.py` calls them, `image_decoding.py` decodes the crop.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardtrain.data.image_decoding import Box
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse

ASPECTS = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a random crop."""
TRIES = 10
"""Number of random crops that are tried; if all are outside the image, its middle is taken."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes of training images; by default none. Held-out images are never changed.

    Args:
      crop: smallest and largest fraction of an image's area that is cropped at random and resized, with a
        width of 3/4 to 4/3 of the height; 0.08 and 1 are usual. None takes the middle, as for evaluation.
      flip: whether an image is mirrored, left to right, with probability 1/2.
      brightness: multiplies the image by a number drawn from 1 - brightness to 1 + brightness.
      contrast: multiplies the distance from the mean grey of the image by a number that is drawn likewise.
      saturation: multiplies the distance of each pixel from its own grey by a number that is drawn likewise.
      mixup: mixes an image and its label with another image, with a weight drawn from a beta distribution
        whose parameters are both this number; 0.2 to 0.8 are usual, 0 disables it.
      cutmix: fills a box of the image from another image, and mixes their labels by its area, which is drawn
        likewise; 1 is usual, 0 disables it. With mixup too, each is applied to half of the images.
      mixed: probability that an image is mixed with another.
      smoothing: the label of the class is 1 - smoothing, and smoothing is divided over all classes.

    Raises:
      ValueError: lists every number that is out of range.

    References:
      Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6 (crops); Zhang et al. 2017, mixup,
      https://arxiv.org/abs/1710.09412, equation 2; Yun et al. 2019, CutMix,
      https://arxiv.org/abs/1905.04899, section 3.1; Szegedy et al. 2015, https://arxiv.org/abs/1512.00567,
      section 7 (smoothing).
    """

    crop: tuple[float, float] | None = None
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixed: float = 1.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            least, most = self.crop
            problems.append(f"crop is {least:g} to {most:g}; use parts above 0, at most 1, such as 0.08 1")
        for name, most in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("mixed", 1)):
            if not 0 <= (value := getattr(self, name)) <= most:
                problems.append(f"{name} is {value:g}; use 0 to {most}")
        for name in ("mixup", "cutmix"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                problems.append(f"{name} is {value:g}; use 0 or more, such as 0.2 or 1")
        if not 0 <= self.smoothing < 1:
            problems.append(f"smoothing is {self.smoothing:g}; use 0 or more, below 1, such as 0.1")
        refuse("images cannot be changed like this", problems)

    @property
    def mixes(self) -> bool:
        """Whether an image may be mixed with another."""
        return self.mixed > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def soft_labels(self) -> bool:
        """Whether labels are a number for each class."""
        return self.mixes or self.smoothing > 0


def crop_box(sides: tuple[int, int], areas: tuple[float, float], random: np.random.Generator) -> Box:
    """Choose a random part of an image.

    Args:
      sides: width and height of the image, in pixels.
      areas: smallest and largest fraction of the image's area.
      random: draws area, shape and position.

    Returns:
      The box; if no random box fits, the middle of the image with the nearest allowed shape.

    >>> crop_box((30, 20), (0.5, 0.5), np.random.default_rng(0))
    (4, 0, 20, 19)
    """
    width, height = sides
    low, high = math.log(ASPECTS[0]), math.log(ASPECTS[1])
    for _ in range(TRIES):
        area = width * height * random.uniform(*areas)
        aspect = math.exp(random.uniform(low, high))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(random.integers(width - across + 1)), int(random.integers(height - down + 1))
            return left, top, left + across, top + down
    across = min(width, max(1, round(height * ASPECTS[1])))
    down = min(height, max(1, round(width / ASPECTS[0])))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue in grey (ITU-R BT.601)."""


def change_colours(image_HWC: np.ndarray, options: Augment, random: np.random.Generator) -> np.ndarray:
    """Mirror an image and change its colours at random.

    Args:
      image_HWC: float32, from 0 to 1.
      options: kinds and sizes of the changes.
      random: draws the changes.

    Returns:
      float32, from 0 to 1, of the same shape.
    """
    if options.flip and random.random() < 0.5:
        image_HWC = image_HWC[:, ::-1]
    if options.brightness:
        image_HWC = np.clip(image_HWC * _draw_factor(options.brightness, random), 0, 1)
    if options.contrast:
        image_HWC = _scale_distance(
            (image_HWC @ GREY).mean(), image_HWC, _draw_factor(options.contrast, random)
        )
    if options.saturation:
        grey_HW1 = (image_HWC @ GREY)[..., None]
        image_HWC = _scale_distance(grey_HW1, image_HWC, _draw_factor(options.saturation, random))
    return np.ascontiguousarray(image_HWC)


def _draw_factor(most: float, random: np.random.Generator) -> np.float32:
    return np.float32(random.uniform(1 - most, 1 + most))


def _scale_distance(centre: np.ndarray, image: np.ndarray, factor: np.float32) -> np.ndarray:
    return np.clip(centre + factor * (image - centre), 0, 1).astype(np.float32)


class Mixing(NamedTuple):
    """How an image is mixed with another.

    Attributes:
      kept: weight of the image, from 0 to 1.
      box: the box that is filled from the other image, as fractions of height and width: (top, left, bottom,
        right); None means that all pixels are weighted sums.
    """

    kept: float
    box: tuple[float, float, float, float] | None


def draw_mixing(options: Augment, random: np.random.Generator) -> Mixing | None:
    """Draw how an image is mixed; None if it is not."""
    if not options.mixes or random.random() >= options.mixed:
        return None
    cuts = options.cutmix > 0 and (options.mixup == 0 or random.random() < 0.5)
    alpha = options.cutmix if cuts else options.mixup
    kept = float(random.beta(alpha, alpha))
    if not cuts:
        return Mixing(kept, None)
    half = math.sqrt(1 - kept) / 2
    row, column = random.random(2)
    return Mixing(kept, (row - half, column - half, row + half, column + half))


def mix_images(image_HWC: np.ndarray, other_HWC: np.ndarray, mixing: Mixing) -> tuple[np.ndarray, float]:
    """Mix an image with another of the same shape.

    Returns:
      float32 (height, width, channels), and the weight of the first image: with a box, its fraction of
        pixels.

    >>> image, kept = mix_images(np.zeros((2, 4, 1)), np.ones((2, 4, 1)), Mixing(0.5, (0.5, -0.2, 1.2, 0.5)))
    >>> image[..., 0].tolist(), kept
    ([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], 0.75)
    """
    if mixing.box is None:
        kept = np.float32(mixing.kept)
        return kept * image_HWC + (1 - kept) * other_HWC, mixing.kept
    height, width = image_HWC.shape[:2]
    top, left, bottom, right = (
        min(side, max(0, round(part * side)))
        for part, side in zip(mixing.box, (height, width) * 2, strict=True)
    )
    image_HWC = image_HWC.copy()
    image_HWC[top:bottom, left:right] = other_HWC[top:bottom, left:right]
    return image_HWC, 1 - (bottom - top) * (right - left) / (height * width)


def soft_label(shares: dict[int, float], classes: int, smoothing: float) -> np.ndarray:
    """Return a label as a number for each class.

    Args:
      shares: class -> its weight; they add up to 1.
      classes: V.
      smoothing: see `Augment`.

    Returns:
      float32 (V,), which adds up to 1.

    >>> soft_label({0: 0.75, 2: 0.25}, 4, 0.0).tolist()
    [0.75, 0.0, 0.25, 0.0]
    """
    label_V = np.full(classes, smoothing / classes, np.float32)
    for each, share in shares.items():
        label_V[each] += (1 - smoothing) * share
    return label_V
