"""Note the random draws of a traced loss, and settle which entries of merged dims belong to which row.

Next: `row_draws.py`, which walks the program.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardtrain.functional.rng import BITS, SPLIT, Draw, Draws
from shardtrain.functional.row_positions import DATA, Position, Shapes

ROWS = (2, 4)
"""The numbers of rows that a loss is traced with."""

GAMMA_SPLITS = (2, 3)
"""Into how many keys jax splits the key of one number of a gamma distribution."""


class RowDraws(NamedTuple):
    """The random draws of a model in training.

    Args:
      draws: all of them, each once.
      problems: those whose numbers depend on how rows are split, with what to write.
    """

    draws: Draws = ()
    problems: tuple[str, ...] = ()


class Variable(NamedTuple):
    """What is known of an array of the program.

    Args:
      position: where it has rows; None if it has none, or nobody knows.
      is_number: whether it counts rows from 0 in each computation, as `arange(rows)` does.
    """

    position: Position | None = None
    is_number: bool = False


@dataclass
class _Seen:
    """A draw whose position among others in its dim is being found: one `outer` for each hypothesis."""

    draw: Draw
    outers: tuple[int, ...] = ()
    left: set[int] | None = None
    problem: str = ""


@dataclass
class DrawRecord:
    """The draws of two programs of one loss, traced with different numbers of rows.

    Args:
      key_dtype: that of the key which the model gets.
      seen: the draws so far.
    """

    key_dtype: Any
    seen: list[_Seen] = field(default_factory=list)

    def found(self) -> RowDraws:
        """Return all draws, those of unknown positions as if they did not count rows."""
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
        """Return the position of an array that is computed from such ones element by element."""
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
        """Note a draw; return where its result has rows. A problem matters if it counts rows."""
        dim = shapes.row_dim
        if dim is None:
            wrong = NOT_ROWS if shapes.differ else ""
            self.seen.append(_Seen(Draw(kind, shapes.few, line=line), problem=wrong))
            return None
        draw = Draw(kind, (*shapes.few[:dim], shapes.per_row, *shapes.few[dim + 1 :]), dim, 1, line)
        if problem:
            self.seen.append(_Seen(draw._replace(dim=None), problem=problem))
            return None
        if shapes.per_row == 1:
            self.seen.append(_Seen(draw))
            return None
        outers = tuple(each for each in range(1, shapes.per_row + 1) if shapes.per_row % each == 0)
        behind = math.prod(shapes.few[dim + 1 :])
        self.seen.append(_Seen(draw, outers))
        inner = tuple(shapes.per_row // outer * behind for outer in outers)
        return Position(len(self.seen) - 1, inner)

    def _drawn(
        self, kind: str, equation: Any, other: Any, key: Variable, shapes: Shapes, line: str
    ) -> Variable:
        """Note a draw of some shape with a key, or with several."""
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
        """A draw of numbers, or of keys."""
        shapes = Shapes(tuple(equation.params["shape"]), tuple(other.params["shape"]), *ROWS)
        return self._drawn(kind, equation, other, inputs[0], shapes, line)

    def split(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """A key that is split into several."""
        return self.bits(equation, other, inputs, line, SPLIT)

    def fold_in(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """A key for each number, which has to be that of a row in the whole batch, if it is of a row."""
        shapes = find_shapes((equation.outvars[0], other.outvars[0]))
        if inputs[1].is_number:
            self.seen.append(_Seen(Draw(SPLIT, shapes.few, line=line), problem=LOCAL_NUMBERS))
        return Variable(self.meet([each.position for each in inputs if each.position is not None]))

    def seed(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """A key from a number."""
        if inputs[0].is_number:
            shape = equation.outvars[0].aval.shape
            self.seen.append(_Seen(Draw(SPLIT, shape, line=line), problem=LOCAL_NUMBERS))
        return inputs[0]

    def gamma(self, equation: Any, other: Any, inputs: Sequence[Variable], line: str) -> Variable:
        """A key for each number of the result, split from one."""
        self.seen.extend(_Seen(Draw(SPLIT, (number,), line=line)) for number in GAMMA_SPLITS)
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
        self.seen.append(_Seen(Draw(SPLIT, (count,), 0, outer, line)))
        return Variable()


def find_shapes(pair: tuple[Any, Any]) -> Shapes:
    """Return the shapes of an array in both programs."""
    few, many = (tuple(getattr(each.aval, "shape", ())) for each in pair)
    return Shapes(few, many, *ROWS)


DRAWN: Mapping[str, Callable[..., Variable]] = {
    "random_bits": DrawRecord.bits,
    "random_fold_in": DrawRecord.fold_in,
    "random_gamma": DrawRecord.gamma,
    "random_seed": DrawRecord.seed,
    "random_split": DrawRecord.split,
}
"""Operation on keys -> how it is noted."""

UNKNOWN = (
    "which of these entries belong to which row is not known, so each microbatch and replica would get the"
    " same numbers; draw before dims are merged, (rows, ...), or use dropout with the dims as they are"
)
NOT_ROWS = (
    "its shape does not count each row once, so its numbers would depend on how rows are split; draw"
    " (rows, ...), or a shape without rows"
)
FOREIGN = (
    "its key is not made from that which the model gets, so each microbatch and replica would get the same"
    " numbers, in every step; use apply.key in the loss, also as an argument, apply(x, apply.key), in the"
    " model a stream of its Rngs (self.rngs.noise()), in linen self.make_rng('dropout')"
)
KEYS_AND_ROWS = (
    "there is a key for each row, and each draws for all rows; draw for one row with the key of a row"
)
LOCAL_NUMBERS = (
    "keys are made from numbers of rows that begin at 0 in each microbatch and replica, so all get the same"
    " numbers; use jax.random.split(key, rows)"
)
