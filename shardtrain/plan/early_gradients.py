"""A step whose gradients are computed in several programs, each of which is sent while later ones compute.

The arithmetic, without jax; what each program sends and when it is ready is traced (`Subject.parts`). Next:
`islands.py`, which chooses their number.
"""

from collections.abc import Sequence
from typing import NamedTuple

NUMS_PROGRAMS = (1, 2, 4)
"""Numbers of programs that are compared."""

EXTRA_SHARE = 0.15
"""What several programs cost of a step, whatever their number: measured with 2, 3 and 4 on CPUs of one host
(docs/benchmarks/bridge.md). Values between them are written to memory, and less is fused."""

SAME_SHARE = 0.01
"""Steps that differ by so little are predicted to be the same."""


class EarlyGradients(NamedTuple):
    """A step with gradients in several programs.

    Args:
      num_programs: how many, at most: there are fewer where few gradients are ready before the end.
      seconds: of the step, until all have been sent and the update is made.
    """

    num_programs: int
    seconds: float


class StepOfIsland(NamedTuple):
    """The step of the slowest island alone, in one program.

    Args:
      gradient_seconds: of loss and gradients of all microbatches.
      update_seconds: of the optimizer, after the last gradient has been sent.
      microbatches: how many; only the last one's gradients are final.
    """

    gradient_seconds: float
    update_seconds: float
    microbatches: int = 1


def early_gradients(
    step: StepOfIsland, ready: Sequence[float], seconds_of_parts: Sequence[float]
) -> EarlyGradients:
    """Return how long a step takes whose gradients are sent in parts, one after the other.

    A part is sent when it has been computed and the one before has been sent. The first microbatches are
    computed before all parts; `EXTRA_SHARE` makes loss and gradients longer if there are several.

    Args:
      step: the step without sending.
      ready: share of the last microbatch's loss and gradients after which each part is there, 1 for the last.
      seconds_of_parts: to send each.

    >>> early_gradients(StepOfIsland(0.9, 0.1), [1.0], [0.5])
    EarlyGradients(num_programs=1, seconds=1.5)
    >>> round(early_gradients(StepOfIsland(0.9, 0.1), [2 / 3, 1.0], [0.25, 0.25]).seconds, 3)
    1.4
    """
    extra = EXTRA_SHARE * (step.gradient_seconds + step.update_seconds) if len(ready) > 1 else 0.0
    computed = step.gradient_seconds + extra
    last = computed / step.microbatches
    end = 0.0
    for share, seconds in zip(ready, seconds_of_parts, strict=True):
        end = max(end, computed - (1 - share) * last) + seconds
    return EarlyGradients(len(ready), end + step.update_seconds)


def fastest(found: Sequence[EarlyGradients]) -> EarlyGradients:
    """Return the one with the fewest programs, which take longer to compile, within 1 % of the fastest.

    >>> fastest([EarlyGradients(1, 2.0), EarlyGradients(2, 1.005), EarlyGradients(4, 1.0)]).num_programs
    2
    """
    most = (1 + SAME_SHARE) * min(each.seconds for each in found)
    near = (each for each in found if each.seconds <= most)
    return min(near, key=lambda each: each.num_programs)
