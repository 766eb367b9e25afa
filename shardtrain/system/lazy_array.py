"""Arrays whose rows are read or computed on access, so that a conversion need not hold all of them."""

from collections.abc import Callable
from typing import Any

import numpy as np


class LazyArray:
    """An array that `array[i, j]` and `np.asarray(array)` read on each access.

    Args:
      read: indices of the first dims -> the values there; () for all values.

    >>> squares = LazyArray(lambda numbers: (np.arange(6).reshape(2, 3) ** 2)[numbers])
    >>> squares[1].tolist(), int(squares[1, 2]), np.asarray(squares).shape
    ([9, 16, 25], 25, (2, 3))
    """

    def __init__(self, read: Callable[[tuple[int, ...]], np.ndarray]) -> None:
        self._read = read

    def __getitem__(self, numbers: int | tuple[int, ...]) -> np.ndarray:
        return self._read(numbers if isinstance(numbers, tuple) else (numbers,))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self._read(())
        return found if dtype is None else found.astype(dtype, copy=False)
