"""What islands send each other to stay replicas, and how long a step waits for it. No jax.

Next: `merge_bytes.py`, which counts the bytes; `early_gradients.py`, gradients that are sent in parts;
`islands.py`, the plan of a cluster.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shardtrain.combine.synchronisation import PRESETS, Synchronisation


class MergeBytes(NamedTuple):
    """Bytes that one replica sends, by ring algorithms; without sums of the loss and the model's state.

    Args:
      num_replicas: that are merged.
      merges: of the merge of each fragment; of gradients, of a step.
      every: steps from one merge of a fragment to its next.
      synchronous: of a first step, in which gradients are averaged; 0 where there are none such.
    """

    num_replicas: int
    merges: tuple[int, ...]
    every: int = 1
    synchronous: int = 0

    @property
    def most(self) -> int:
        """Bytes of the largest merge."""
        return max(self.merges)

    @property
    def per_step(self) -> float:
        """Bytes of a step on average, if no merge is skipped."""
        return sum(self.merges) / self.every


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
    synchronisation: Synchronisation, merges: MergeBytes, bytes_per_second: float, step_seconds: float
) -> Join:
    """Return what it costs to join islands, if they skip no merge.

    What is sent beside later steps (`overlap`) costs no time as long as these steps last.

    Args:
      synchronisation: how they are joined.
      merges: what each sends for it.
      bytes_per_second: what an island sends; inf: no link is given.
      step_seconds: of a step of the slowest island alone.

    >>> every = join(Synchronisation(), MergeBytes(2, (4000,)), 4e3, 0.1)
    >>> every.bytes_per_step, every.seconds
    (4000.0, 1.0)
    >>> rare = Synchronisation(on="deltas", every=10, overlap=4)
    >>> [round(each, 3) for each in join(rare, MergeBytes(2, (4000,), every=10), 4e3, 0.1)]
    [10, 400.0, 0.04, 0.06]
    """
    seconds = [num_bytes / bytes_per_second for num_bytes in merges.merges]
    hidden = [min(each, synchronisation.overlap * step_seconds) for each in seconds]
    waited = sum(seconds) - sum(hidden)
    return Join(merges.every, merges.per_step, sum(hidden) / merges.every, waited / merges.every)


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
