"""Find the random draws of a traced loss, and the dims that count the rows of the batch.

The loss is traced with two numbers of rows: dims that differ count rows. If a dim counts rows and something
else (tokens, windows), `row_positions.py` follows the rows to it. Next: `rng.py`, which uses the result.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from shardtrain.jaxpr.equations import CALLED, find_line, list_equations, scan_counts

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
    # `fold_in` and `seed` alone draw nothing
    draws = {*DRAWN, *OTHER_GENERATORS} - {"random_fold_in", "random_seed"}
    if not any(each.equation.primitive.name in draws for each in list_equations(few)):
        return RowDraws()
    walk = _Walk(DrawRecord(few.jaxpr.invars[0].aval.dtype))
    try:
        many = trace_loss(model, loss, batch, ROWS[1], train)
        walk.run(few.jaxpr, many.jaxpr, [Variable()] * len(few.jaxpr.invars), "")
    except _ProgramsDiffer as error:
        problem = (
            f"{str(error) or 'the model'} does not do the same for {ROWS[0]} rows as for {ROWS[1]}, so its"
            " draws cannot be followed; let the model do the same for any number of rows"
        )
        return RowDraws(problems=(problem,))
    return walk.record.found()


class _ProgramsDiffer(Exception):
    """The two programs have different operations; the text is the source line."""


@dataclass
class _Walk:
    """Walk two programs of one loss, traced with different numbers of rows, side by side."""

    record: DrawRecord
    given: dict[Any, Variable] = field(default_factory=dict)

    def run(
        self, jaxpr: Any, other: Any, inputs: Sequence[Variable], line: str, is_cached: bool = False
    ) -> list[Variable]:
        """Walk two jaxprs; return the rows of their outputs.

        Args:
          jaxpr, other: the two programs.
          inputs: the rows of their inputs.
          line: the source line of the equation that calls them.
          is_cached: whether jax may have traced them for another line.
        """
        for pair, known in zip(zip(jaxpr.invars, other.invars, strict=True), inputs, strict=True):
            self._set(pair, known)
        for pair in zip(jaxpr.constvars, other.constvars, strict=False):
            # an array of the model's own that has as many entries as there are rows
            self._set(pair, Variable(is_number=find_shapes(pair).row_dim is not None))
        where = line
        for equation, of_other in zip(jaxpr.eqns, other.eqns, strict=False):
            where = line if is_cached and line else find_line(equation) or line
            kinds = [(each.primitive, len(each.outvars)) for each in (equation, of_other)]
            if kinds[0] != kinds[1]:
                raise _ProgramsDiffer(where)
            for pair, known in zip(
                zip(equation.outvars, of_other.outvars, strict=True),
                self._equation(equation, of_other, where, is_cached),
                strict=True,
            ):
                self._set(pair, known)
        if len(jaxpr.eqns) != len(other.eqns):
            raise _ProgramsDiffer(where)
        return [self._known(atom) for atom in jaxpr.outvars]

    def _set(self, pair: tuple[Any, Any], known: Variable) -> None:
        # a dim that counts rows alone says where they are; what is followed to it has to agree
        anchor = find_position(find_shapes(pair))
        if anchor is not None:
            if known.position is not None:
                self.record.meet([known.position, anchor])
            known = known._replace(position=anchor)
        self.given[pair[0]] = known

    def _known(self, atom: Any) -> Variable:
        return Variable() if hasattr(atom, "val") else self.given.get(atom, Variable())

    def _equation(self, equation: Any, other: Any, line: str, is_cached: bool) -> list[Variable]:
        name, inputs = equation.primitive.name, [self._known(atom) for atom in equation.invars]
        if name in DRAWN:
            return [DRAWN[name](self.record, equation, other, inputs, line)]
        if name in OTHER_GENERATORS:
            for pair in zip(equation.outvars, other.outvars, strict=True):
                self.record.add(BITS, find_shapes(pair), line, FOREIGN)
            return [Variable()] * len(equation.outvars)
        if name == "scan":
            return self._scan(equation, other, inputs, line, is_cached)
        if name == "cond":
            branches = zip(equation.params["branches"], other.params["branches"], strict=True)
            found = [self.run(few.jaxpr, many.jaxpr, inputs[1:], line, is_cached) for few, many in branches]
            return found[0]
        if name == "while":
            after = inputs[equation.params["cond_nconsts"] :]
            return self._called(equation, other, "body_jaxpr", after, line, is_cached)
        inner = next((key for key in CALLED if key in equation.params), None)
        if inner is not None and name not in ("pallas_call", "reduce", "reduce_window"):
            return self._called(equation, other, inner, inputs, line, is_cached or name in ("jit", "pjit"))
        is_number = any(each.is_number for each in inputs)
        if name == "iota":
            shapes = find_shapes((equation.outvars[0], other.outvars[0]))
            is_number = shapes.row_dim is not None and shapes.row_dim == equation.params["dimension"]
        found = [
            self.record.meet(follow_positions(equation, number, [each.position for each in inputs]))
            for number in range(len(equation.outvars))
        ]
        return [Variable(position, is_number) for position in found]

    def _called(
        self, equation: Any, other: Any, key: str, inputs: Sequence[Variable], line: str, is_cached: bool
    ) -> list[Variable]:
        few, many = (getattr(each.params[key], "jaxpr", each.params[key]) for each in (equation, other))
        return self.run(few, many, inputs[len(inputs) - len(few.invars) :], line, is_cached)

    def _scan(
        self, equation: Any, other: Any, inputs: Sequence[Variable], line: str, is_cached: bool
    ) -> list[Variable]:
        few, many = equation.params["jaxpr"].jaxpr, other.params["jaxpr"].jaxpr
        consts, carried = scan_counts(equation)
        # a slice, and an array of slices, have as many entries behind those of a row
        given = [
            known
            if known.position is None or max(known.position.inner) * ROWS[0] <= math.prod(of_body.aval.shape)
            else known._replace(position=None)
            for known, of_body in zip(inputs, few.invars, strict=True)
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
