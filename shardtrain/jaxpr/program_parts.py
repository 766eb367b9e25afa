"""Cut a traced program into consecutive programs, each with some of the outputs.

Each program computes what its outputs need and earlier programs did not compute, and receives their values.
Next: `scan_pieces.py`, which lets a cut fall inside a loop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Var, jaxprs_in_params

from shardtrain.jaxpr.split import REPEATED


def equation_cost(equation: Any) -> float:
    """Return the cost of an equation: 2 per multiply-add of a product, 1 per element of other results.

    A scan costs all of its steps; a loop with an unknown number of steps costs one step.
    """
    size = float(sum(math.prod(v.aval.shape) for v in equation.outvars))
    inner = [program_cost(getattr(each, "jaxpr", each)) for each in jaxprs_in_params(equation.params)]
    if inner:
        # of the branches of a conditional one is run
        each = max(inner) if equation.primitive.name == "cond" else sum(inner)
        # the program of a scatter or a reduction is what is done with two elements
        return max(size, each * equation.params.get("length", 1))
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * size * math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * size * math.prod(kernel) / max(out_features, 1)
    return size


def program_cost(jaxpr: Any) -> float:
    """Return the sum of the costs of its equations.

    >>> import jax
    >>> x, y = jax.numpy.ones((2, 3)), jax.numpy.ones((3, 4))
    >>> program_cost(jax.make_jaxpr(lambda x, y: -(x @ y))(x, y).jaxpr)  # 2 * 2 * 3 * 4, and 2 * 4
    56.0
    """
    return sum(map(equation_cost, jaxpr.eqns))


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramPart:
    """One of the consecutive programs.

    Args:
      closed: its inputs are those of the whole program that `reads` lists, then `received`; its outputs are
        those that `returns` lists, then `sent`.
      reads: indices of inputs of the whole program.
      received: values of earlier parts.
      returns: indices of outputs of the whole program.
      sent: values that later parts receive.
    """

    closed: ClosedJaxpr
    reads: tuple[int, ...]
    received: tuple[Var, ...]
    returns: tuple[int, ...]
    sent: tuple[Var, ...]


def cut_program(traced: ClosedJaxpr, part_of: Sequence[int]) -> list[ProgramPart]:
    """Cut a program.

    Args:
      traced: without effects.
      part_of: the part of each output, from 0; every part has an output.
    """
    jaxpr = traced.jaxpr
    equations, needed = _assign_equations(jaxpr, part_of)
    made = [{v for equation in each for v in equation.outvars} for each in equations]
    numbers = {v: number for number, v in enumerate(jaxpr.invars)}
    # what a part needs and does not make is an input, a constant, or made by an earlier one
    given = [
        [v for v, parts in needed.items() if part in parts and v not in own] for part, own in enumerate(made)
    ]
    reads = [sorted(numbers[v] for v in each if v in numbers) for each in given]
    others = {*numbers, *jaxpr.constvars}
    received = [[v for v in each if v not in others] for each in given]
    sent: list[dict[Var, None]] = [{} for _ in equations]
    for v in dict.fromkeys(v for each in received for v in each):
        sent[next(part for part, own in enumerate(made) if v in own)][v] = None
    found = []
    for part, kept in enumerate(equations):
        returns = tuple(number for number, each in enumerate(part_of) if each == part)
        program = jaxpr.replace(
            invars=[*(jaxpr.invars[n] for n in reads[part]), *received[part]],
            outvars=[*(jaxpr.outvars[n] for n in returns), *sent[part]],
            eqns=kept[::-1],
        )
        found.append(
            ProgramPart(
                closed=ClosedJaxpr(program, traced.consts),
                reads=tuple(reads[part]),
                received=tuple(received[part]),
                returns=returns,
                sent=tuple(sent[part]),
            )
        )
    return found


def _assign_equations(
    jaxpr: Any, part_of: Sequence[int]
) -> tuple[list[list[Any]], dict[Var, dict[int, None]]]:
    """Return the equations of each part in reverse order, and the parts that need each value."""
    # dicts keep their order, so that programs are the same in each process
    needed: dict[Var, dict[int, None]] = {}

    def need(v: Any, part: int) -> None:
        if isinstance(v, Var):
            needed.setdefault(v, {})[part] = None

    for v, part in zip(jaxpr.outvars, part_of, strict=True):
        need(v, part)
    equations: list[list[Any]] = [[] for _ in range(max(part_of) + 1)]
    for equation in reversed(jaxpr.eqns):
        parts = sorted({part for v in equation.outvars for part in needed.get(v, ())})
        # the first part that needs an equation computes it; what is cheap to repeat, each of them
        for part in parts if _is_repeated(equation) else parts[:1]:
            equations[part].append(equation)
            for v in equation.invars:
                need(v, part)
    return equations, needed


def _is_repeated(equation: Any) -> bool:
    """Return whether an equation only makes a larger array from its inputs."""

    def num_elements(variables: Sequence[Any]) -> int:
        return sum(v.aval.size for v in variables)

    is_larger = num_elements(equation.outvars) > num_elements(equation.invars)
    return equation.primitive.name in REPEATED and is_larger


def estimate_ready_costs(traced: ClosedJaxpr) -> list[float]:
    """Return the cost of computing each output of a program."""
    costs, ancestors = [], dict[Any, int]()
    for number, equation in enumerate(traced.jaxpr.eqns):
        found = 1 << number
        for v in equation.invars:
            found |= 0 if isinstance(v, Literal) else ancestors.get(v, 0)
        ancestors.update(dict.fromkeys(equation.outvars, found))
        costs.append(equation_cost(equation))

    def total(found: int) -> float:
        return sum(cost for number, cost in enumerate(costs) if found >> number & 1)

    outputs = [0 if isinstance(v, Literal) else ancestors.get(v, 0) for v in traced.jaxpr.outvars]
    known = {found: total(found) for found in dict.fromkeys(outputs)}
    return [known[found] for found in outputs]


def parts_by_cost(costs: Sequence[float], start: float, num_parts: int) -> list[int]:
    """Assign outputs to parts of about equal cost after a start.

    There are fewer parts if few outputs are ready before the end.

    Args:
      costs: the cost of each output, see `estimate_ready_costs`.
      start: the cost of the forward pass, which is in the first part.
      num_parts: the largest number of parts.

    >>> parts_by_cost([12, 15, 20, 20], 10, 2), parts_by_cost([20, 20], 10, 3)
    ([0, 0, 1, 1], [0, 0])
    """
    candidates = sorted(set(costs))
    last = candidates[-1]
    wanted = [start + (last - start) * number / num_parts for number in range(1, num_parts)]
    # what is ready soon after a cut is before it: the outputs of one scan differ by what is done with them
    slack = (last - start) / num_parts / 4
    nearest = {min(candidates, key=lambda c: abs(c - each)) + slack for each in wanted}
    cuts = sorted(cut for cut in nearest if cut < last - slack)
    found = [sum(cost > cut for cut in cuts) for cost in costs]
    numbers = {part: number for number, part in enumerate(sorted(set(found)))}
    return [numbers[part] for part in found]
