"""The interface of rules by which replicas decide whether to meet. Next: `moved.py`, a rule."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax


class MeetingRule(NamedTuple):
    """A number that each replica finds, and the decision that all make of these numbers, both inside jit.

    Args:
      measure: (deltas, params) -> float32 scalar. Both are path -> array of a fragment: what this replica
        has changed, and the common parameters. Without changes it is finite too.
      is_due: float32 (n,) -> bool scalar: whether deltas are sent now. The numbers are those of the replicas
        of a mesh, or of the processes of all islands: each process gives the number of its island or stage.
    """

    measure: Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array]
    is_due: Callable[[jax.Array], jax.Array]
