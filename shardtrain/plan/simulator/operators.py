"""Operators of a step and the values between them, as a search over their shardings takes them. No jax.

`program_operators.py` finds them in a traced program. Next: `operator_shardings.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardtrain import axes

SAME_DIM = {axes.RESIDUAL_SEQ: axes.SEQ, axes.KV_HEADS: axes.HEADS}
"""Names that a dim has at some places -> the name that it has here."""

WHOLE = frozenset((axes.LAYERS, axes.HEIGHT, axes.WIDTH))
"""Dims that are not sharded here: a loop goes through blocks, and a convolution needs neighbours."""


@dataclass(frozen=True)
class Part:
    """A kernel, or an array, as a device may have a part of it.

    Args:
      amount: flops of a kernel, or bytes of an array.
      dims: the dims that it can be split over.
    """

    amount: float
    dims: frozenset[str]


Work = tuple[Part, tuple[Part, ...], float]
"""Flops of a kernel, the arrays that it reads and writes, and how often it runs."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What is sharded in one way.

    Args:
      name: what a reader sees.
      kind: a kind of `task_graph.KINDS`; "update" for a parameter.
      sizes: dim -> size, of the dims that it may be sharded over.
      work: of each of its kernels.
      names: of its dims, as the rules of a layout have them.
      kept_bytes: memory of a parameter, its gradient and optimizer state.
    """

    name: str
    kind: str
    names: frozenset[str]
    sizes: Mapping[str, int]
    work: tuple[Work, ...]
    kept_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Use:
    """A value as an operator reads it.

    Args:
      operator: its number.
      messages: how many a collective of it sends in a step; a part of one where arrays are sent together.
      num_bytes: in a step.
    """

    operator: int
    messages: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Value:
    """An array between operators.

    Args:
      dims: those it can be split over.
      source: the operator that makes it.
      uses: who reads it.
      is_parameter: whether it is there from the step before.
    """

    dims: frozenset[str]
    source: int
    uses: tuple[Use, ...]
    is_parameter: bool = False


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The operators of a step in the order of the program, those of parameters last.

    Args:
      operators: all.
      values: what they hand to each other.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]


def dims_of(names: Iterable[str | None]) -> list[str]:
    """Return the dims of these names that something can be split over.

    >>> dims_of(("layers", "batch", "residual_seq", None))
    ['batch', 'seq']
    """
    found = (SAME_DIM.get(name, name) for name in names if name is not None)
    return [name for name in found if name not in WHOLE]
