"""Find the random draws of a traced loss, and the dims that count the rows of the batch.

The loss is traced with two numbers of rows: dims that differ count rows. If a dim counts rows and something
else (tokens, windows), `row_positions.py` follows the rows to it. Next: `rng.py`, which uses the result.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.functional.draw_record import (
    DRAWN,
    FOREIGN,
    DrawRecord,
    RowDraws,
    Variable,
    find_shapes,
)
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import BITS
from shardtrain.functional.row_positions import DATA, ROWS, find_position, follow_positions
from shardtrain.functional.traced_loss import trace_loss
from shardtrain.jaxpr.equations import (
    CALLS,
    find_difference,
    find_line,
    find_runs,
    list_equations,
    scan_counts,
)
from shardtrain.jaxpr.forward import forward

OTHER_GENERATORS = ("rng_bit_generator", "rng_uniform", "threefry2x32")
"""Operations that draw without a key of the step."""


def find_draws(model: Model, loss: Loss, batch: Mapping[str, Any], train: bool = True) -> RowDraws:
    """Find the random draws of a loss, without computing anything.

    Args:
      model: the whole model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: arrays or shapes of any number of rows.
      train: whether to trace the loss of training; False means that of held-out data.
    """
    few = trace_loss(model, loss, batch, ROWS[0], train)
    equations = list_equations(few)
    # `fold_in` and `seed` alone draw nothing
    draws = {*DRAWN, *OTHER_GENERATORS} - {"random_fold_in", "random_seed"}
    if not any(each.equation.primitive.name in draws for each in equations):
        return RowDraws()
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
