"""Batches that follow each other through a pipeline without a flush: how far each stage runs ahead. No jax.

Next: `train_step/unflushed_steps.py`, which runs them.
"""


def forwards_ahead(num_stages: int, in_flight: int) -> list[int]:
    """Return for each stage how many batches its forwards are ahead of its backwards.

    One forward and one backward take turns, as in 1F1B (PipeDream, Narayanan et al. 2019, section 3.2). The
    first stage is ahead by all batches in flight but one. The last stage computes the backward of a batch
    together with its forward. With fewer batches than stages the limit holds for the stages between, too.

    Args:
      num_stages: S, 1 or more.
      in_flight: batches between the forward of the first stage and the update, 1 or more.

    >>> forwards_ahead(4, 4), forwards_ahead(4, 2), forwards_ahead(2, 4), forwards_ahead(3, 1)
    ([3, 2, 1, 0], [1, 1, 1, 0], [3, 0], [0, 0, 0])
    """
    longest = max(in_flight, num_stages)
    return [min(in_flight - 1, longest - 1 - stage) for stage in range(num_stages - 1)] + [0]


def waves_before_barrier(in_flight: int, every: int) -> int:
    """Return the smallest delay, in waves, between requesting a barrier and reaching it.

    It has started batches of later waves by then, and those are to be done, too.

    Args:
      in_flight: batches in flight.
      every: steps of a wave.

    >>> [waves_before_barrier(in_flight, 4) for in_flight in (1, 2, 4, 5, 8, 9)]
    [0, 1, 1, 2, 2, 3]
    """
    return 0 if in_flight == 1 else (in_flight - 1) // every + 1


def format_in_flight(num_stages: int, in_flight: int) -> str:
    """Return what stages hold: weights until the backward of a batch, gradients until its update.

    >>> print(format_in_flight(2, 4))
    up to 4 batches in flight, without a flush; stages keep 4, 1 versions of their weights, and 1, 4 gradients
    """
    ahead = forwards_ahead(num_stages, in_flight)
    versions = ", ".join(str(each + 1) for each in ahead)
    gradients = ", ".join(str(in_flight - each) for each in ahead)
    return (
        f"up to {in_flight} batches in flight, without a flush; stages keep {versions} versions of their"
        f" weights, and {gradients} gradients"
    )
