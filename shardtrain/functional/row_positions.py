"""Follow the rows of a batch through the operations of a traced program.

The rows of an array are where the element with number i in memory belongs to row `i // inner % rows`.
Reshaping does not change `inner`. Next: `row_draws.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


def find_position(shapes: Shapes) -> Position | None:
    """Return the position of rows in an array that has a dim of rows only."""
    dim = shapes.row_dim
    if dim is None or shapes.per_row != 1:
        return None
    return Position(DATA, (math.prod(shapes.few[dim + 1 :]),))


Moves = Mapping[int, int]
"""Dim of an input -> the same dim of the output; dims that are reduced are left out."""


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
        moves = _find_moves(equation, number, before, shape)
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


def _find_moves(equation: Any, number: int, before: Sequence[int], after: Sequence[int]) -> Moves:
    name = equation.primitive.name
    if name.startswith(("reduce_", "arg")) and "axes" in equation.params:
        gone = set(equation.params["axes"])
        return {dim: to for to, dim in enumerate(dim for dim in range(len(before)) if dim not in gone)}
    if name in MOVES:
        return MOVES[name](equation, number)
    # elementwise, and along other dims than that of rows
    return {dim: dim for dim in range(len(before))} if len(before) == len(after) else {}


def _squeeze(equation: Any, number: int) -> Moves:
    ndim = equation.invars[0].aval.ndim
    gone = {dim % ndim for dim in equation.params["dimensions"]}
    return {dim: to for to, dim in enumerate(dim for dim in range(ndim) if dim not in gone)}


def _dot(equation: Any, number: int) -> Moves:
    contracted, batch = equation.params["dimension_numbers"]
    free = [
        [dim for dim in range(equation.invars[i].aval.ndim) if dim not in (*contracted[i], *batch[i])]
        for i in range(2)
    ]
    begin = len(batch[0]) + (len(free[0]) if number else 0)
    return {dim: to for to, dim in enumerate(batch[number])} | {
        dim: begin + to for to, dim in enumerate(free[number])
    }


def _convolution(equation: Any, number: int) -> Moves:
    numbers = equation.params["dimension_numbers"]
    return {numbers.lhs_spec[0]: numbers.out_spec[0]} if number == 0 else {}


def _gather(equation: Any, number: int) -> Moves:
    numbers = equation.params["dimension_numbers"]
    others = [i for i in range(equation.outvars[0].aval.ndim) if i not in numbers.offset_dims]
    if number == 1:
        return dict(enumerate(others))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(equation.invars[0].aval.ndim) if dim not in gone]
    at = dict(zip(kept, numbers.offset_dims, strict=True))
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return at | {dim: others[index] for dim, index in batching}


def _all_but(*names: str) -> Callable[[Any, int], Moves]:
    """Return moves that keep every dim except those that the operation permutes."""

    def moves(equation: Any, number: int) -> Moves:
        found = {dim: dim for dim in range(equation.invars[number].aval.ndim)}
        for name in names:
            value = equation.params[name]
            for dim in value if isinstance(value, tuple) else (value,):
                found.pop(dim, None)
        return found

    return moves


_OPAQUE = (
    *("custom_linear_solve", "ffi_call", "pallas_call", "ragged_dot_general", "scatter", "scatter-add"),
)
"""Operations through which rows are not followed."""

MOVES: Mapping[str, Callable[[Any, int], Moves]] = {
    "broadcast_in_dim": lambda equation, _: dict(enumerate(equation.params["broadcast_dimensions"])),
    "concatenate": _all_but("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "gather": _gather,
    **dict.fromkeys(_OPAQUE, lambda *_: {}),
    "rev": _all_but("dimensions"),
    "sort": _all_but("dimension"),
    "squeeze": _squeeze,
    "transpose": lambda equation, _: {dim: to for to, dim in enumerate(equation.params["permutation"])},
}
"""Operation -> how its dims move; other operations keep their dims or reduce them."""
