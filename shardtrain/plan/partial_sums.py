"""Sums of which devices have parts until they are complete. No jax. Next: `trace.py`, which finds them."""

from collections.abc import Mapping, Set
from typing import NamedTuple

from shardtrain.plan.fusion import ALIASES, Step
from shardtrain.plan.program import Dims

LINEAR = ("add", "add_any", "neg", "convert_element_type", "transpose")
"""Operations by which the parts of a sum may stay apart: those of sums are added once, not one by one."""

LOOKUPS = {"gather": 0, "scatter-add": 2}
"""Operation -> which of its operands has the rows that it looks up or adds."""


class Partial(NamedTuple):
    """A sum that is not complete.

    Args:
      summed: names of the dims over which devices have parts of it.
      dims: the names of its own dims when it was made.
      rows: of a lookup the number of its table, of the sum of rows into a table that of the rows.
    """

    summed: tuple[str, ...]
    dims: Dims
    rows: int | None = None


def num_terms(number: int, makers: Mapping[int, Step], constants: Set[int]) -> int:
    """Return the number of arrays of which one is the sum, as jax adds up gradients.

    Args:
      number: of the array.
      makers: number of an array -> the operation that writes it.
      constants: numbers of arrays that are computed from constants alone.
    """
    step = makers.get(number)
    if number in constants:
        return 0
    if step is not None and step.name == "add_any":
        return sum(num_terms(each, makers, constants) for each in step.reads)
    if step is not None and step.name in (*ALIASES, "convert_element_type", "transpose"):
        return num_terms(step.reads[0], makers, constants)
    return 1
