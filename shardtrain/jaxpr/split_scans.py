"""Cut a program into two, and each scan whose outputs both need into two scans.

The first scan stacks what the second needs of each step. Next: `deferred_outputs.py`, which cuts functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Var

from shardtrain.jaxpr.cut import ProgramPart, cut_program, is_repeated
from shardtrain.jaxpr.equations import scan_counts
from shardtrain.jaxpr.forward import bind, evaluate, inline


def cut_in_two(closed: ClosedJaxpr, now: Sequence[bool], later: Sequence[bool]) -> list[ProgramPart]:
    """Cut a program into what some outputs need, and what others need in addition.

    Args:
      closed: a program without calls, see `inline`.
      now: whether each output is of the first part.
      later: whether each output is of the second part. Outputs of neither are dropped.
    """
    splits, unneeded = _plan_scans(closed, now, later)

    def compute(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        if id(equation) in unneeded:
            return [None] * len(equation.outvars)
        return splits.get(id(equation), partial(bind, equation))(inputs)

    def run(*inputs: Any) -> list[Any]:
        return [0 if x is None else x for x in evaluate(closed, inputs, compute)]

    if splits:
        closed = jax.make_jaxpr(run)(*closed.in_avals)
    part_of = [0 if first else 1 if second else -1 for first, second in zip(now, later, strict=True)]
    return cut_program(closed, part_of, 2)


def _plan_scans(
    closed: ClosedJaxpr, now: Sequence[bool], later: Sequence[bool]
) -> tuple[dict[int, "_SplitScan"], set[int]]:
    """Return identity of a scan that both parts need -> its two scans, and equations that neither needs."""
    splits: dict[int, _SplitScan] = {}
    unneeded: set[int] = set()
    needs = [
        {v for v, yes in zip(closed.jaxpr.outvars, each, strict=True) if yes and isinstance(v, Var)}
        for each in (now, later)
    ]
    for equation in reversed(closed.eqns):
        first, wanted = ([v in each for v in equation.outvars] for each in needs)
        second = [yes and not before for before, yes in zip(first, wanted, strict=True)]
        if any(first) and any(second) and equation.primitive.name == "scan":
            splits[id(equation)] = split = _split_scan(equation, first, second)
            reads = split.reads
        else:
            is_read = any(first), any(wanted) and (is_repeated(equation) or not any(first))
            reads = [range(len(equation.invars) * yes) for yes in is_read]
            if not any(is_read):
                unneeded.add(id(equation))
        for needed, numbers in zip(needs, reads, strict=True):
            needed.update(v for n in numbers if isinstance(v := equation.invars[n], Var))
    return splits, unneeded


@dataclass(frozen=True, kw_only=True)
class _SplitScan:
    """The two scans of a scan.

    Args:
      equation: the scan.
      first, second: the programs of a step.
      carried: the numbers of the inputs that the scan carries.
      both: the numbers of those that the first scan carries and the second one reads too.
    """

    equation: Any
    first: ProgramPart
    second: ProgramPart
    carried: range
    both: Sequence[int]

    @property
    def reads(self) -> list[set[int]]:
        """The numbers of the inputs that each scan reads."""
        first, second = ({*part.reads, *self._find_carried(part)} for part in (self.first, self.second))
        return [first, second - {*self.both}]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of both scans; None in place of others."""
        found, stacks = self._scan(self.first, inputs, {}, self.both)
        keys = [*self.second.received, *self.both]
        more, _ = self._scan(self.second, inputs, dict(zip(keys, stacks, strict=True)), ())
        return [(found | more).get(n) for n in range(len(self.equation.outvars))]

    def _find_carried(self, part: ProgramPart) -> list[int]:
        return [self.carried[n] for n in part.returns if n < len(self.carried)]

    def _scan(
        self, part: ProgramPart, inputs: Sequence[Any], given: dict[Any, Any], kept: Sequence[int]
    ) -> tuple[dict[int, Any], list[Any]]:
        """Return the outputs of one of the scans by number, and its stacks for the other one.

        Args:
          part: the program of a step.
          inputs: all inputs of the scan.
          given: number of an input, or value of the first part -> its stack.
          kept: the numbers of the carried inputs to stack.
        """
        carried = self._find_carried(part)
        known = {n: inputs[n] for n in part.reads if n < self.carried.start}
        rows = {n: inputs[n] for n in part.reads if n >= self.carried.stop} | given

        def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            values = {**known, **dict(zip(carried, carry, strict=True)), **dict(zip(rows, row, strict=True))}
            found = evaluate(part.closed, (values[key] for key in (*part.reads, *part.received)))
            return found[: len(carried)], [*found[len(carried) :], *(values[n] for n in kept)]

        options = {name: self.equation.params[name] for name in ("length", "reverse", "unroll")}
        final, stacks = lax.scan(step, [inputs[n] for n in carried], list(rows.values()), **options)
        num_stacked = len(part.returns) - len(carried)
        return dict(zip(part.returns, [*final, *stacks], strict=False)), stacks[num_stacked:]


def _split_scan(equation: Any, now: list[bool], later: list[bool]) -> _SplitScan:
    """Split a scan: what a step carries to the next one may need more to be carried.

    Args:
      equation: the scan.
      now: of each output, whether the first part needs it.
      later: of each output, whether only the second part needs it.
    """
    body, (start, number) = inline(equation.params["jaxpr"]), scan_counts(equation)
    carried = range(start, start + number)
    while True:
        first, second = cut_in_two(body, now, later)
        more_now = [yes or n in first.reads for yes, n in zip(now, carried, strict=False)]
        more_later = [
            not before and (yes or n in second.reads)
            for before, yes, n in zip(more_now, later, carried, strict=False)
        ]
        if (more_now, more_later) == (now[:number], later[:number]):
            break
        now, later = more_now + now[number:], more_later + later[number:]
    both = [n for n, yes in zip(carried, now, strict=False) if yes and n in second.reads]
    return _SplitScan(equation=equation, first=first, second=second, carried=carried, both=both)
