"""Compute how far stages run ahead if several batches are in a pipeline at the same time. No jax.

Next: `train_step/sync/waves.py`, which runs these batches.
"""


def count_forwards_ahead(num_stages: int, in_flight: int) -> list[int]:
    """Return the number of batches by which each stage's forwards are ahead of its backwards.

    Forwards and backwards alternate, as in 1F1B (PipeDream, Narayanan et al. 2019, section 3.2). The first
    stage is ahead by all batches in flight except one. The last stage computes the backward of a batch
    directly after its forward. With fewer batches than stages the middle stages have the same limit.

    Args:
      num_stages: S, 1 or more.
      in_flight: batches between the forward of the first stage and the update, 1 or more.

    >>> [count_forwards_ahead(*sizes) for sizes in ((4, 4), (4, 2), (2, 4), (3, 1))]
    [[3, 2, 1, 0], [1, 1, 1, 0], [3, 0], [0, 0, 0]]
    """
    longest = max(in_flight, num_stages)
    return [min(in_flight - 1, longest - 1 - stage) for stage in range(num_stages - 1)] + [0]


def count_waves_before_barrier(in_flight: int, every: int) -> int:
    """Return the smallest delay, in waves, between requesting a barrier and reaching it.

    Until then batches of later waves have been started, which must be finished too.

    Args:
      in_flight: number of batches in flight.
      every: number of steps of a wave.

    >>> [count_waves_before_barrier(in_flight, 4) for in_flight in (1, 2, 4, 5, 8, 9)]
    [0, 1, 1, 2, 2, 3]
    """
    return 0 if in_flight == 1 else (in_flight - 1) // every + 1


def format_in_flight(num_stages: int, in_flight: int) -> str:
    """Format how many versions of weights and gradients the stages hold.

    >>> print(format_in_flight(2, 4))
    up to 4 batches in flight, without a flush; stages keep 4, 1 versions of their weights, and 1, 4 gradients
    """
    ahead = count_forwards_ahead(num_stages, in_flight)
    versions = ", ".join(str(each + 1) for each in ahead)
    gradients = ", ".join(str(in_flight - each) for each in ahead)
    return (
        f"up to {in_flight} batches in flight, without a flush; stages keep {versions} versions of their"
        f" weights, and {gradients} gradients"
    )
