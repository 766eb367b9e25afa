"""What an island asks of the program and the checkpoints of its caller. Next: `island.py`, which asks."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from shardtrain.elastic.codecs import Arrays
from shardtrain.elastic.flat_sum import Packing


class Program(Protocol):
    """What the islands train together; it must not depend on who is there.

    Attributes:
      state: all that a step changes, a tree of arrays with the same shapes and dtypes on all islands.
      codecs: may be left out; a tree like what `compute` returns, of names of `elastic.codecs.CODECS`, by
        which islands send each array; "" for one that they send as it is. Equal on all islands.
    """

    state: Any

    @property
    def compute(self) -> Callable[..., Any]:
        """(step, slots) -> the sum over some slots of the batch of a step, added in this order.

        With `Membership.batch` "members" the third argument, a range, has the numbers of all batches of the
        step: slot s is slot `s % num_slots` of the batch `s // num_slots` of these.

        With `Membership.every` above 1 it is of all steps from this one to the next exchange. It is a tree of
        arrays: gradients, losses and counts. The first call, of the first two slots of step 0, is before the
        island joins, so that others do not wait for a compilation.
        """
        ...

    def apply(self, step: int, total: Any) -> None:
        """Set the state after a step, or all steps of an exchange, given the sum over all slots."""
        ...


class IslandCheckpoints(Protocol):
    """The checkpoints of an elastic run, which its chief saves."""

    def check_others(self) -> None:
        """Raise ValueError if this island does not fit the run; called before it takes the others' state."""
        ...

    def find(self) -> int:
        """Return the step of the newest valid checkpoint; 0 if there is none."""
        ...

    def revoke(self, number: int) -> None:
        """Take over from the chiefs before an epoch: no save that they have begun may count after this."""
        ...

    def restore(self) -> bool:
        """Set the program's state to the checkpoint that was found; return False if there was none.

        Later checkpoints are void, and deleted.
        """
        ...

    def save(self, step: int, *, is_last: bool) -> bool:
        """Save the program's state after a step, as the chief.

        Args:
          step: number of steps done.
          is_last: the run ends with it, so the checkpoint must be complete when this returns.

        Returns:
          False if members changed meanwhile, so that another one is the chief.
        """
        ...


def copy_leaves(tree: Any) -> Arrays:
    """Return contiguous copies of the arrays of a tree, in the memory of the host."""
    return [np.array(x, order="C") for x in jax.tree.leaves(tree)]


def make_packing(program: Program, sums: Sequence[Any]) -> Packing:
    """Return the places of the sums of a program, with its codecs."""
    return Packing(sums, jax.tree.leaves(getattr(program, "codecs", ())))
