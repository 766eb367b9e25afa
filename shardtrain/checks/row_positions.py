"""Follow the rows of a batch through the operations of a traced program.

The rows of an array are where the element with number i in memory belongs to row `i // inner % rows`.
Reshaping does not change `inner`. Next: `row_draws.py`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardtrain.jaxpr.dims import Moves, find_mixed, find_moves

DATA = None
"""The draw of known positions."""

ROWS = (2, 4)
"""The numbers of rows with which a loss is traced."""


class Position(NamedTuple):
    """Where an array has rows.

    Args:
      draw: the index of the draw that it comes from, whose rows are not known yet; None if they are known.
      inner: stride of rows in memory, for each hypothesis; -1 means that the hypothesis is refuted.
    """

    draw: int | None
    inner: tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes of one array for both numbers of `ROWS`.

    >>> Shapes((3, 10), (3, 20)).row_dim, Shapes((3, 10), (3, 20)).per_row
    (1, 5)
    """

    few: tuple[int, ...]
    many: tuple[int, ...]

    @property
    def differ(self) -> bool:
        """Whether the shape depends on the number of rows."""
        return self.few != self.many

    @property
    def row_dim(self) -> int | None:
        """The only dim that counts rows, or several entries per row; None without one."""
        if len(self.few) != len(self.many):
            return None
        dims = [i for i, (few, many) in enumerate(zip(self.few, self.many, strict=True)) if few != many]
        if len(dims) != 1:
            return None
        few, many = self.few[dims[0]], self.many[dims[0]]
        return dims[0] if few % ROWS[0] == 0 and few * ROWS[1] == many * ROWS[0] else None

    @property
    def per_row(self) -> int:
        """The number of entries per row in this dim."""
        assert self.row_dim is not None
        return self.few[self.row_dim] // ROWS[0]


def find_shapes(pair: tuple[Any, Any]) -> Shapes:
    """Return the shapes of an array in both programs."""
    few, many = (tuple(getattr(each.aval, "shape", ())) for each in pair)
    return Shapes(few, many)


def find_position(shapes: Shapes) -> Position | None:
    """Return the position of rows in an array that has a dim of rows only."""
    dim = shapes.row_dim
    if dim is None or shapes.per_row != 1:
        return None
    return Position(DATA, (math.prod(shapes.few[dim + 1 :]),))


def follow_positions(equation: Any, output: int, positions: Sequence[Position | None]) -> list[Position]:
    """Return the positions of rows in an output of an operation, one for each input with rows.

    Args:
      equation: the operation.
      output: the number of its output.
      positions: the positions of rows in its inputs.
    """
    shape = tuple(getattr(equation.outvars[output].aval, "shape", ()))
    found = []
    for number, position in enumerate(positions):
        if position is None:
            continue
        before = tuple(equation.invars[number].aval.shape)
        if equation.primitive.name == "reshape":
            found.append(position)
            continue
        mixed = find_mixed(equation)
        moves = {d: to for d, to in find_moves(equation, number, output).items() if d not in mixed}
        inner = tuple(_move_position(each, before, shape, moves) for each in position.inner)
        if any(each > 0 for each in inner):
            found.append(position._replace(inner=inner))
    return found


def _move_position(inner: int, before: tuple[int, ...], after: tuple[int, ...], moves: Moves) -> int:
    """Return the stride of rows after dims have moved; -1 if rows are reduced.

    >>> _move_position(3, (4, 2, 3), (4, 3, 2), {0: 0, 1: 2, 2: 1})
    1
    """
    behind = 1
    for dim in range(len(before) - 1, -1, -1):
        size = before[dim]
        if size > 1 and behind <= inner < behind * size:
            to = moves.get(dim)
            if inner % behind or inner * ROWS[0] > behind * size or to is None or after[to] != size:
                return -1
            return inner // behind * math.prod(after[to + 1 :])
        behind *= size
    return -1
