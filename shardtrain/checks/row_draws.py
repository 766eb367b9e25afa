"""Find the random draws of a traced loss, and the dims that count the rows of the batch.

The loss is traced with two numbers of rows: dims that differ count rows. If a dim counts rows and something
else (tokens, windows), `row_positions.py` follows the rows to it. Next: `functional/rng.py`, which uses the
result.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardtrain.checks.row_positions import (
    DATA,
    ROWS,
    Position,
    Shapes,
    find_position,
    find_shapes,
    follow_positions,
)
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import BITS, SPLIT, Draw, Draws
from shardtrain.functional.traced_loss import trace_few_rows, trace_loss
from shardtrain.jaxpr.equations import (
    CALLS,
    find_difference,
    find_line,
    find_runs,
    list_equations,
    scan_counts,
)
from shardtrain.jaxpr.forward import forward

GAMMA_SPLITS = (2, 3)
"""Numbers of keys into which jax splits the key of one number of a gamma distribution."""

OTHER_GENERATORS = ("rng_bit_generator", "rng_uniform", "threefry2x32")
"""Operations that draw without a key of the step."""


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


def find_draws(model: Model, loss: Loss, batch: Mapping[str, Any], train: bool = True) -> RowDraws:
    """Find the random draws of a loss, without computing anything.

    Args:
      model: the whole model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: arrays or shapes of any number of rows.
      train: whether to trace the loss of training; False means that of held-out data.
    """
    few, num_rows = trace_few_rows(
        lambda number: trace_loss(model, loss, batch, number, train), next(iter(batch.values())).shape[0]
    )
    equations = list_equations(few)
    # `fold_in` and `seed` alone draw nothing
    draws = {*DRAWN, *OTHER_GENERATORS} - {"random_fold_in", "random_seed"}
    if not any(each.equation.primitive.name in draws for each in equations):
        return RowDraws()
    if num_rows != ROWS[0]:
        problem = (
            f"the loss or the model cannot take {ROWS[0]} rows, so its draws cannot be followed; let it take"
            " any number of rows, or draw nothing"
        )
        return RowDraws(problems=(problem,))
    many = trace_loss(model, loss, batch, ROWS[1], train)
    if line := find_difference(equations, list_equations(many)):
        where = "the model" if line == "?" else line
        problem = (
            f"{where} does not do the same for {ROWS[0]} rows as for {ROWS[1]}, so its draws cannot be"
            " followed; let the model do the same for any number of rows"
        )
        return RowDraws(problems=(problem,))
    walk = _Walk(DrawRecord(few.jaxpr.invars[0].aval.dtype))
    walk.run(few, many, [Variable()] * len(few.jaxpr.invars), "")
    return walk.record.found()


@dataclass
class _Walk:
    """Walk two programs of one loss, traced with different numbers of rows, side by side."""

    record: DrawRecord

    def run(
        self, few: Any, many: Any, inputs: Sequence[Variable], line: str, is_cached: bool = False
    ) -> list[Variable]:
        """Walk two programs; return the rows of their outputs.

        Args:
          few, many: the two programs.
          inputs: the rows of their inputs.
          line: the source line of the equation that calls them.
          is_cached: whether jax may have traced them for another line.
        """

        def follow(equation: Any, given: list[Variable], other: Any) -> list[Variable]:
            where = line if is_cached and line else find_line(equation) or line
            found = self._equation(equation, other, given, where, is_cached)
            return list(map(self._anchor, equation.outvars, other.outvars, found))

        given = map(self._anchor, few.jaxpr.invars, many.jaxpr.invars, inputs)
        return forward(few, given, follow, self._constant, many)

    def _constant(self, atom: Any, other: Any) -> Variable:
        # an array of the model's own that has as many entries as there are rows
        is_number = find_shapes((atom, other)).row_dim is not None
        return self._anchor(atom, other, Variable(is_number=is_number))

    def _anchor(self, atom: Any, other: Any, known: Variable) -> Variable:
        # a dim that counts rows alone says where they are; what is followed to it has to agree
        anchor = find_position(find_shapes((atom, other)))
        if anchor is None:
            return known
        if known.position is not None:
            self.record.meet([known.position, anchor])
        return known._replace(position=anchor)

    def _equation(
        self, equation: Any, other: Any, inputs: list[Variable], line: str, is_cached: bool
    ) -> Sequence[Variable]:
        name = equation.primitive.name
        if name in DRAWN:
            return [DRAWN[name](self.record, equation, other, inputs, line)]
        if name in OTHER_GENERATORS:
            for pair in zip(equation.outvars, other.outvars, strict=True):
                self.record.add(BITS, find_shapes(pair), line, FOREIGN)
            return [Variable()] * len(equation.outvars)
        if name == "scan":
            return self._scan(equation, other, inputs, line, is_cached)
        runs = zip(find_runs(equation, inputs), find_runs(other, inputs), strict=True)
        is_cached |= name in CALLS
        found = [self.run(few, many, given, line, is_cached) for (few, given), (many, _) in runs]
        if found:
            return found[0]
        is_number = any(each.is_number for each in inputs)
        if name == "iota":
            shapes = find_shapes((equation.outvars[0], other.outvars[0]))
            is_number = shapes.row_dim is not None and shapes.row_dim == equation.params["dimension"]
        positions = [
            self.record.meet(follow_positions(equation, number, [each.position for each in inputs]))
            for number in range(len(equation.outvars))
        ]
        return [Variable(position, is_number) for position in positions]

    def _scan(
        self, equation: Any, other: Any, inputs: Sequence[Variable], line: str, is_cached: bool
    ) -> list[Variable]:
        few, many = equation.params["jaxpr"], other.params["jaxpr"]
        consts, carried = scan_counts(equation)
        # a slice, and an array of slices, have as many entries behind those of a row
        given = [
            known
            if known.position is None or max(known.position.inner) * ROWS[0] <= math.prod(of_body.aval.shape)
            else known._replace(position=None)
            for known, of_body in zip(inputs, few.jaxpr.invars, strict=True)
        ]
        before = len(self.record.seen)
        found = self.run(few, many, given, line, is_cached)
        # what is carried may have rows only from the first step on
        coming = [each.position for each in found[:carried]]
        late = [
            i
            for i, position in enumerate(coming, consts)
            if given[i].position is None and position is not None and position.draw is DATA
        ]
        if not late:
            return found
        for i in late:
            given[i] = found[i - consts]
        del self.record.seen[before:]
        return self.run(few, many, given, line, is_cached)
