"""Record the random draws of a traced loss, and find which entries of merged dims belong to which row.

Next: `row_draws.py`, which walks the program.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardtrain.functional.rng import BITS, SPLIT, Draw, Draws
from shardtrain.functional.row_positions import DATA, ROWS, Position, Shapes

GAMMA_SPLITS = (2, 3)
"""Numbers of keys into which jax splits the key of one number of a gamma distribution."""


class RowDraws(NamedTuple):
    """The random draws of a model in training.

    Args:
      draws: each draw once.
      problems: messages about draws whose numbers depend on how rows are split, with the change to make.
    """

    draws: Draws = ()
    problems: tuple[str, ...] = ()


class Variable(NamedTuple):
    """The rows of an array of the program.

    Args:
      position: where it has rows; None if it has none, or they are unknown.
      is_number: whether it counts rows from 0 in each computation, like `arange(rows)`.
    """

    position: Position | None = None
    is_number: bool = False


@dataclass
class _DrawCandidate:
    """A draw with the hypotheses about its rows: the possible numbers of entries before them, `outers`."""

    draw: Draw
    outers: tuple[int, ...] = ()
    left: set[int] | None = None
    problem: str = ""


@dataclass
class DrawRecord:
    """The draws of two programs of one loss, traced with different numbers of rows.

    Args:
      key_dtype: the dtype of the key that the model gets.
      seen: the draws so far.
    """

    key_dtype: Any
    seen: list[_DrawCandidate] = field(default_factory=list)

    def found(self) -> RowDraws:
        """Return all draws; a draw with unknown rows counts as one without rows."""
        draws: dict[Draw, Draw] = {}
        problems: dict[str, None] = {}
        for each in self.seen:
            draw, problem = each.draw, each.problem
            if each.outers and not problem:
                if each.left is not None and len(each.left) == 1:
                    draw = draw._replace(outer=each.left.copy().pop())
                else:
                    draw, problem = draw._replace(dim=None), UNKNOWN
            if problem:
                shape = ", ".join(
                    f"{size} * rows" if i == each.draw.dim else str(size)
                    for i, size in enumerate(each.draw.shape)
                )
                problems[f"{draw.line or 'the model'} {draw.kind} ({shape}): {problem}"] = None
            draws.setdefault(draw._replace(line=""), draw)
        return RowDraws(tuple(draws.values()), tuple(problems))

    def meet(self, positions: Sequence[Position]) -> Position | None:
        """Return the position of rows in an elementwise result of arrays with these positions."""
        data = next((each for each in positions if each.draw is DATA), None)
        for each in positions:
            if each.draw is not DATA and data is not None:
                assert each.draw is not None
                seen = self.seen[each.draw]
                fits = {
                    outer
                    for outer, inner in zip(seen.outers, each.inner, strict=True)
                    if inner == data.inner[0]
                }
                seen.left = fits if seen.left is None else seen.left & fits
        return data or next(iter(positions), None)

    def add(self, kind: str, shapes: Shapes, line: str, problem: str = "") -> Position | None:
        """Record a draw; return where its result has rows. A problem applies only to a draw with rows."""
        dim = shapes.row_dim
        if dim is None:
            wrong = NOT_ROWS if shapes.differ else ""
            self.seen.append(_DrawCandidate(Draw(kind, shapes.few, line=line), problem=wrong))
            return None
        draw = Draw(kind, (*shapes.few[:dim], shapes.per_row, *shapes.few[dim + 1 :]), dim, 1, line)
        if problem:
            self.seen.append(_DrawCandidate(draw._replace(dim=None), problem=problem))
            return None
        if shapes.per_row == 1:
            self.seen.append(_DrawCandidate(draw))
            return None
        outers = tuple(each for each in range(1, shapes.per_row + 1) if shapes.per_row % each == 0)
        behind = math.prod(shapes.few[dim + 1 :])
        self.seen.append(_DrawCandidate(draw, outers))
        inner = tuple(shapes.per_row // outer * behind for outer in outers)
        return Position(len(self.seen) - 1, inner)

    def _add_with_key(
        self, kind: str, equation: Any, other: Any, key: Variable, shapes: Shapes, line: str
    ) -> Variable:
        """Record a draw of some shape with one key or several."""
        keys = find_shapes((equation.invars[0], other.invars[0]))
        foreign = FOREIGN if equation.invars[0].aval.dtype != self.key_dtype else ""
        found = self.add(kind, shapes, line, KEYS_AND_ROWS if keys.differ else foreign)
        if keys.differ and key.position is not None:
            behind = math.prod(shapes.few)
            found = key.position._replace(inner=tuple(inner * behind for inner in key.position.inner))
        return Variable(found)

    def bits(
        self, equation: Any, other: Any, inputs: Sequence[Variable], line: str, kind: str = BITS
    ) -> Variable:
        """Record a draw of numbers or keys."""
        shapes = Shapes(tuple(equation.params["shape"]), tuple(other.params["shape"]))
        return self._add_with_key(kind, equation, other, inputs[0], shapes, line)

    def split(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """Record a key that is split."""
        return self.bits(equation, other, inputs, line, SPLIT)

    def fold_in(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """Record a key for each number; numbers of rows must count the rows of the whole batch."""
        shapes = find_shapes((equation.outvars[0], other.outvars[0]))
        if inputs[1].is_number:
            self.seen.append(_DrawCandidate(Draw(SPLIT, shapes.few, line=line), problem=LOCAL_NUMBERS))
        return Variable(self.meet([each.position for each in inputs if each.position is not None]))

    def seed(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """Record a key made from a number."""
        if inputs[0].is_number:
            shape = equation.outvars[0].aval.shape
            self.seen.append(_DrawCandidate(Draw(SPLIT, shape, line=line), problem=LOCAL_NUMBERS))
        return inputs[0]

    def gamma(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """Record the keys of a gamma distribution, one for each number, split from one key."""
        self.seen.extend(_DrawCandidate(Draw(SPLIT, (number,), line=line)) for number in GAMMA_SPLITS)
        keys = find_shapes((equation.invars[0], other.invars[0]))
        shapes = find_shapes((equation.outvars[0], other.outvars[0]))
        if keys.differ:
            return inputs[0]
        dim = shapes.row_dim
        ndim = len(keys.few)
        if dim is None or shapes.per_row > 1 or dim < ndim:
            # flattened: rows of the parameter, if they can be followed
            position = self.add(BITS, shapes, line, "" if dim is None else UNKNOWN)
            return Variable(position)
        count = math.prod(shapes.few[ndim:]) // ROWS[0]
        outer = math.prod(shapes.few[ndim:dim])
        self.seen.append(_DrawCandidate(Draw(SPLIT, (count,), 0, outer, line)))
        return Variable()


def find_shapes(pair: tuple[Any, Any]) -> Shapes:
    """Return the shapes of an array in both programs."""
    few, many = (tuple(getattr(each.aval, "shape", ())) for each in pair)
    return Shapes(few, many)


DRAWN: Mapping[str, Callable[..., Variable]] = {
    "random_bits": DrawRecord.bits,
    "random_fold_in": DrawRecord.fold_in,
    "random_gamma": DrawRecord.gamma,
    "random_seed": DrawRecord.seed,
    "random_split": DrawRecord.split,
}
"""Operation on keys -> the method that records it."""

UNKNOWN = (
    "which of these entries belong to which row is not known, so each microbatch and replica would get the"
    " same numbers; draw before dims are merged, (rows, ...), or use dropout with the dims as they are"
)
NOT_ROWS = (
    "its shape does not count each row once, so its numbers would depend on how rows are split; draw"
    " (rows, ...), or a shape without rows"
)
FOREIGN = (
    "its key is not derived from the key that the model gets, so each microbatch and replica would get the"
    " same numbers, in every step; use apply.key in the loss, also as an argument, apply(x, apply.key), in"
    " the model a stream of its Rngs (self.rngs.noise()), in linen self.make_rng('dropout')"
)
KEYS_AND_ROWS = "each row has a key, and each key draws for all rows; draw for one row with the key of a row"
LOCAL_NUMBERS = (
    "keys are made from numbers of rows that begin at 0 in each microbatch and replica, so all get the same"
    " numbers; use jax.random.split(key, rows)"
)
