"""Bytes of an image file to pixels, whole or a part of it. The only importer of pillow.

Next: `image_files.py`, the source of the bytes; `augmentation.py`, which parts are taken.
"""

import io
from collections.abc import Callable
from importlib import import_module

import numpy as np

RESIZE = 256 / 224
"""The shorter side before the crop, as a part of the size: what most evaluations on ImageNet take."""

MOST_RATIO = 100
"""Largest ratio of the sides of an image."""

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; the last two are outside."""


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
        # a strip would be enlarged to gigabytes before the middle is cropped
        if max(file.size) > MOST_RATIO * min(file.size):
            raise ValueError(f"its sides are {file.size}, the longer above {MOST_RATIO} times the other")
        image = file.convert("RGB")
    scale = round(size * RESIZE) / min(image.size) if min(image.size) > size else size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), pillow.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return _pixels(image.crop((left, top, left + size, top + size)))


def decode_part(content: bytes, size: int, choose: Callable[[int, int], Box]) -> np.ndarray:
    """Decode an image, and resize a part of it.

    A JPEG that is much larger than needed is decoded at a half, a quarter or an eighth of its size, which
    takes less time.

    Args:
      content: as for `decode_image`.
      size: height and width of the result.
      choose: (width, height) of the image -> the part.

    Returns:
      float32 (size, size, 3), from 0 to 1.

    Raises:
      OSError, ValueError: it is damaged.
    """
    pillow = import_module("PIL.Image")
    with pillow.open(io.BytesIO(content)) as file:
        width, height = file.size
        left, top, right, bottom = choose(width, height)
        # never so small that the part has less than twice the result's rows and columns
        least = 2 * size * width // (right - left) + 1, 2 * size * height // (bottom - top) + 1
        file.draft("RGB", least)
        across, down = file.size[0] / width, file.size[1] / height
        part = (left * across, top * down, right * across, bottom * down)
        return _pixels(file.convert("RGB").resize((size, size), pillow.Resampling.BILINEAR, box=part))


def _pixels(image: object) -> np.ndarray:
    return np.asarray(image, np.float32) / np.float32(255)
