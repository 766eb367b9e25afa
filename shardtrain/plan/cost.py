"""What one run of a traced program costs a device, as values. No jax.

Next: `program_cost.py`, which finds it.
"""

from typing import NamedTuple


class Sent(NamedTuple):
    """Collectives of one kind over the same axes.

    Args:
      kind: as in `plan.hlo.collectives`.
      axes: mesh axes that they run over.
      num_bytes: of the arrays of all of them together, on one device.
      times: number of collectives.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    times: float


class Loop(NamedTuple):
    """A loop over a named dim, such as the blocks of a model.

    Args:
      over: the dim.
      seconds: of all its trips, without `stacking_seconds`.
      carried_bytes: what one trip hands to the next.
      stacking_seconds: to copy what its trips write to stacked arrays and read from them.
    """

    over: str
    seconds: float
    carried_bytes: float
    stacking_seconds: float = 0.0


class Segment(NamedTuple):
    """A part of a program: a loop over the blocks of a model, or what is before, between or behind them.

    Args:
      flops: of matrix products and convolutions.
      seconds: of its kernels, with what a loop stacks.
      sent: its collectives of activations.
    """

    flops: float
    seconds: float
    sent: tuple[Sent, ...]


class Cost(NamedTuple):
    """What one run of a program costs a device.

    Args:
      flops: of matrix products and convolutions.
      seconds: by the durations that it was found with.
      peak_bytes: the most memory for results and temporary arrays at any time, without inputs.
      sent: collectives of activations.
      loops: those over a named dim, in order.
      segments: of which the program consists; the loops over blocks are every second one.
    """

    flops: float
    seconds: float
    peak_bytes: float
    sent: tuple[Sent, ...]
    loops: tuple[Loop, ...]
    segments: tuple[Segment, ...] = ()
