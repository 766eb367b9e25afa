"""Read untrusted .npy files within the bounds of their size."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import open_regular


class ArrayHeader(NamedTuple):
    """The header of a .npy file: dtype and shape of the array, and the bytes before it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> ArrayHeader:
    """Read the header of a .npy file, and check it against the size of the file.

    Raises:
      OSError: see `open_regular`.
      ValueError: it is no .npy file, has objects or Fortran order, or fewer bytes than its shape needs.
    """
    with open_regular(path) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, dtype = read[version](file)
        except Exception as error:  # NumPy parses it as Python, with any error of Python's parsers
            raise ValueError(f"{path} is no .npy file ({str(error)[:120]})") from None
        offset, num_bytes = file.tell(), os.fstat(file.fileno()).st_size
    if dtype.hasobject or dtype.itemsize == 0 or (fortran and len(shape) > 1):
        raise ValueError(f"{path} is an array of {dtype} in an unsupported order or kind; write it again")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{path} has the shape {short(shape)}; sizes are 0 or more")
    if (needed := math.prod(shape) * dtype.itemsize) > num_bytes - offset:
        raise ValueError(
            f"{path} has {num_bytes - offset:,} bytes of data; its shape {short(shape)} of {dtype} needs"
            f" {short(needed)}: it is cut off, or damaged"
        )
    return ArrayHeader(dtype, shape, offset)


def read_array(path: Path) -> np.ndarray:
    """Read a .npy file.

    Raises:
      OSError, ValueError: see `read_header`.
    """
    dtype, shape, offset = read_header(path)
    with open_regular(path) as file:
        file.seek(offset)
        return np.fromfile(file, dtype, math.prod(shape)).reshape(shape)
