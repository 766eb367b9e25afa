"""Compute how often to save, from the time of a save and the time between failures.

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9); Daly 2006,
"A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3).
"""

import math


def young_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return the best seconds of work between saves, to first order: sqrt(2 d M) (Young 1974).

    Args:
      save_seconds: d, seconds for which a save stops the training.
      failure_seconds: M, mean seconds between failures of the whole run.

    >>> round(young_interval(300, 24 * 3600) / 60)
    120
    """
    return math.sqrt(2 * save_seconds * failure_seconds)


def daly_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return the best seconds of work between saves, to higher order (Daly 2006, equation 37).

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d where d < 2 M, and M elsewhere.

    Args:
      save_seconds: d.
      failure_seconds: M.

    Examples:
      The three cases of figures 3 to 5 of the source: 117, 57 and 9.1 minutes.

      >>> [round(daly_interval(300, hours * 3600) / 60, 1) for hours in (24, 6, 0.25)]
      [116.7, 56.7, 9.1]
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = save_seconds / (2 * failure_seconds)
    first = math.sqrt(2 * save_seconds * failure_seconds)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def estimate_seconds(
    work_seconds: float,
    interval_seconds: float,
    save_seconds: float,
    failure_seconds: float,
    restart_seconds: float = 0.0,
) -> float:
    """Return the mean seconds of a run that fails and restarts from its last save (Daly 2006).

    M e^(R / M) (e^((t + d) / M) - 1) T / t is exact if failures are exponential, may happen during saves and
    restarts, and the last piece of work is saved too.

    Args:
      work_seconds: T, of the run without failures and saves.
      interval_seconds: t, of work between saves; at most T.
      save_seconds: d.
      failure_seconds: M, mean seconds between failures. inf means that it never fails.
      restart_seconds: R, seconds from a failure until the run trains again.

    >>> round(estimate_seconds(500 * 3600, 117 * 60, 300, 24 * 3600, 600) / 3600)
    548
    """
    interval = min(interval_seconds, work_seconds)
    pieces = work_seconds / interval
    if failure_seconds == math.inf:
        return pieces * (interval + save_seconds)
    piece = (interval + save_seconds) / failure_seconds
    if max(piece, restart_seconds / failure_seconds) > 700:
        return math.inf
    return failure_seconds * math.exp(restart_seconds / failure_seconds) * math.expm1(piece) * pieces
