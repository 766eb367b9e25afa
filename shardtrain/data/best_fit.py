"""Pack samples of different lengths into few windows of one length (best fit decreasing)."""

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack samples into windows: the longest first, each into the window where it leaves the least space.

    Args:
      lengths: lengths of the samples, int (n,), from 1 to `capacity`.
      capacity: the length of a window.

    Returns:
      (order, ends): the samples of all windows, window after window, int64 (n,); and where the samples of
      each window end, int64 (num_windows,). The samples within a window rise, and so do the first samples of
      windows.

    References:
      Johnson et al. 1974, Worst-case performance bounds for simple one-dimensional packing algorithms, SIAM
      Journal on Computing 3(4), 299-325 (best fit decreasing).

    >>> order, ends = best_fit(np.array([3, 7, 5, 5]), 10)
    >>> order.tolist(), ends.tolist()
    ([0, 1, 2, 3], [2, 4])
    """
    windows: list[list[int]] = []
    spaces: list[int] = []  # the spaces that windows have left, rising, each once
    having: dict[int, list[int]] = {}  # space -> the windows that have it left
    # longest first: short samples fill the gaps
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            window, space = len(windows), capacity
            windows.append([])
        else:
            space = spaces[at]
            window = having[space].pop()
            if not having[space]:
                del spaces[at]
        windows[window].append(sample)
        if left := space - length:
            waiting = having.setdefault(left, [])
            if not waiting:
                insort(spaces, left)
            waiting.append(window)
    windows = sorted(map(sorted, windows))
    order = np.array([sample for window in windows for sample in window], np.int64)
    return order, np.cumsum([len(window) for window in windows], dtype=np.int64)
