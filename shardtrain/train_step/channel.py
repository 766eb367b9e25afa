"""The channel of an island to the others: where its arrays go, and in which form."""

from collections.abc import Callable
from typing import Any, NamedTuple

from shardtrain.islands.transfer import Transfer

AllGather = Callable[[str, Any], list[Any]]
"""(name, value of this rank) -> the values of all ranks."""


def gather_alone(name: str, value: Any = None) -> list[Any]:
    """Return the values of all ranks of a run of one rank."""
    return [value]


class Channel(NamedTuple):
    """The channel of an island to the others.

    Args:
      transfer: sends buckets of arrays.
      all_gather: gathers a value of every rank, by name, before each collective over islands; it reports
        which rank is missing, which MPI in a compiled program cannot.
      dtype: the dtype of the gradients that are sent, see `islands.options.Across`.
      num_parts: the largest number of programs that compute the gradients of a mean: what one has computed is
        sent while the next ones compute, see `gradient_pieces.py`.
    """

    transfer: Transfer
    all_gather: AllGather = gather_alone
    dtype: str = "float32"
    num_parts: int = 1
