"""Audio at another rate, window by window: each is what it would be in the whole file, resampled at once.

Next: `audio_files.py`.
"""

from importlib import import_module
from math import gcd
from typing import NamedTuple

import numpy as np

REACH = 10
"""A frame is made of so many frames on each side of it, of the lower of the two rates."""

MOST_RATE = 768_000
"""The highest rate of files that are resampled: the filter is as long as the rate, and headers name any."""


class Span(NamedTuple):
    """The frames of a file of which a window is made.

    Attributes:
      start: the first one to read.
      stop: one past the last one; the file may end before.
      up: by how much the rate is multiplied.
      down: by how much it is divided then.
      skip: frames of the result before the window.
    """

    start: int
    stop: int
    up: int
    down: int
    skip: int


def span_of(first: int, num_frames: int, own_rate: int, rate: int) -> Span:
    """Return what to read of a file for frames of another rate.

    Args:
      first: the first frame, at `rate`.
      num_frames: number of frames, at `rate`.
      own_rate: frames in a second of the file.
      rate: frames in a second of the result.

    >>> span_of(100, 50, 8000, 8000)
    Span(start=100, stop=150, up=1, down=1, skip=0)
    >>> span_of(100, 50, 16000, 8000)
    Span(start=178, stop=321, up=1, down=2, skip=11)
    """
    up, down = rate // gcd(rate, own_rate), own_rate // gcd(rate, own_rate)
    if up == down:
        return Span(first, first + num_frames, 1, 1, 0)
    margin = -(-REACH * max(up, down) // up) + 1
    # from a frame on that is one at both rates
    start = max(0, first * down // up - margin) // down * down
    stop = -(-(first + num_frames) * down // up) + margin
    return Span(start, stop, up, down, first - start * up // down)


def resampled(audio: np.ndarray, span: Span, num_frames: int) -> np.ndarray:
    """Return a window of what was read, float32, of at most `num_frames`: fewer where the file ended.

    Args:
      audio: float32, the frames of the span.
      span: what they are.
      num_frames: of the window.
    """
    if span.up == span.down or not len(audio):
        return audio
    found = import_module("scipy.signal").resample_poly(audio, span.up, span.down)
    return found[span.skip : span.skip + num_frames].astype(np.float32)
