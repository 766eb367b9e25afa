"""What islands send each other to stay replicas, and how long a step waits for it. No jax.

Next: `islands.py`, the plan of a cluster; `combine/synchronisation.py`, the options.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardtrain.combine.synchronisation import PRESETS, Synchronisation
from shardtrain.plan.hlo.collectives import ALL_REDUCE
from shardtrain.plan.traffic import sent_bytes
from shardtrain.plan.weights import GRADIENT_BYTES


class Join(NamedTuple):
    """What the joining of islands costs, as means over the steps of a round.

    Args:
      steps: from one merge of a parameter to the next.
      bytes_per_step: that an island sends.
      hidden_seconds: of a step, in which it sends beside its computation.
      seconds: of a step, in which it waits.
    """

    steps: int
    bytes_per_step: float
    hidden_seconds: float
    seconds: float


def join(
    synchronisation: Synchronisation,
    num_islands: int,
    num_parameters: int,
    bytes_per_second: float,
    step_seconds: float,
) -> Join:
    """Return what it costs to join islands by a ring in float32.

    Codecs, which send less, and rules by which islands may skip a merge, are not counted. What is sent while
    an island goes on (`overlap`) costs it nothing as long as these steps last.

    Args:
      synchronisation: how they are joined.
      num_islands: how many.
      num_parameters: elements of all parameters.
      bytes_per_second: what an island sends; inf: no link is given.
      step_seconds: of a step of the slowest island alone.

    >>> every = join(Synchronisation(), 2, 1000, 4e3, 0.1)
    >>> every.bytes_per_step, every.seconds
    (4000.0, 1.0)
    >>> rare = Synchronisation(on="deltas", every=10, overlap=4)
    >>> [round(each, 3) for each in join(rare, 2, 1000, 4e3, 0.1)]
    [10, 400.0, 0.04, 0.06]
    """
    steps = synchronisation.every if synchronisation.on_deltas else 1
    merges = synchronisation.fragments if synchronisation.on_deltas else 1
    whole = sent_bytes(ALL_REDUCE, num_islands, GRADIENT_BYTES * num_parameters)
    merge_seconds = 0.0 if math.isinf(bytes_per_second) else whole / merges / bytes_per_second
    hidden = min(merge_seconds, synchronisation.overlap * step_seconds)
    return Join(steps, whole / steps, hidden * merges / steps, (merge_seconds - hidden) * merges / steps)


def own_copies(synchronisation: Synchronisation) -> int:
    """Return how many float32 arrays like the parameters an island has, because it is joined like this.

    What it changed since the last merge, what is under way, and the momentum of the outer optimizer; of one
    that is given in Python nothing is known.

    >>> [own_copies(PRESETS[name]) for name in ("every-step", "local-sgd", "diloco")]
    [0, 1, 2]
    """
    if not synchronisation.on_deltas:
        return 0
    momentum = getattr(synchronisation.outer, "momentum", 0.0)
    return 1 + (synchronisation.overlap > 0) + (momentum > 0)


def candidates(given: Synchronisation) -> Mapping[str, Synchronisation]:
    """Return the ways of joining islands that a plan compares: that of the run, and the presets."""
    own = {} if given in PRESETS.values() else {"of the run": given}
    return {**own, **PRESETS}
