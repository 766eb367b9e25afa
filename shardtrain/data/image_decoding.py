"""Decode image files to pixels, whole or in part. Only this module imports pillow.

Next: `image_files.py`, which reads the files; `augmentation.py`, which chooses the parts.
"""

import io
from collections.abc import Callable
from importlib import import_module

import numpy as np

RESIZE = 256 / 224
"""Ratio of the shorter side before the crop to the size, as in most evaluations on ImageNet."""

MOST_RATIO = 100
"""Largest ratio of the sides of an image."""

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; right and bottom are outside the box."""


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

    A JPEG that is much larger than needed is decoded at a half, a quarter or an eighth of its size, to save
    time.

    Args:
      content: as for `decode_image`.
      size: height and width of the result.
      choose: (width, height) of the image -> the box of the part.

    Returns:
      float32 (size, size, 3), from 0 to 1.

    Raises:
      OSError, ValueError: it is damaged.
    """
    pillow = import_module("PIL.Image")
    with pillow.open(io.BytesIO(content)) as file:
        width, height = file.size
        left, top, right, bottom = choose(width, height)
        # the part keeps at least twice the rows and columns of the result
        least = 2 * size * width // (right - left) + 1, 2 * size * height // (bottom - top) + 1
        file.draft("RGB", least)
        across, down = file.size[0] / width, file.size[1] / height
        part = (left * across, top * down, right * across, bottom * down)
        return _pixels(file.convert("RGB").resize((size, size), pillow.Resampling.BILINEAR, box=part))


def _pixels(image: object) -> np.ndarray:
    return np.asarray(image, np.float32) / np.float32(255)
