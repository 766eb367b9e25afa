"""Cut a traced program into consecutive programs, each with some of the outputs.

Each program computes what its outputs need and earlier programs did not compute, and receives their values.
Next: `scan_pieces.py` and `split_scans.py`, which let a cut fall inside a loop.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Var

REPEATED = ("broadcast_in_dim", "convert_element_type", "iota")
"""Primitives that each program applies that needs the result, if it is larger than their inputs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramPart:
    """One of several programs that compute a whole program one after the other.

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


def select_equations(
    closed: ClosedJaxpr, outputs: Iterable[Any], choose: Callable[[int, Any, bool], bool]
) -> tuple[dict[int, Any], dict[Var, None]]:
    """Select the equations on which values depend, back to values that others compute.

    Args:
      closed: the program.
      outputs: the values.
      choose: (number of an equation, the equation, whether its results are needed) -> whether to select it.

    Returns:
      (number -> selected equation, in order; all values that they or the outputs read).
    """
    # a dict keeps its order, so that programs are the same in each process
    needed = {v: None for v in outputs if isinstance(v, Var)}
    found = {}
    for number, equation in reversed(list(enumerate(closed.eqns))):
        if choose(number, equation, any(v in needed for v in equation.outvars)):
            found[number] = equation
            needed.update((v, None) for v in equation.invars if isinstance(v, Var))
    return dict(reversed(found.items())), needed


def build_part(
    closed: ClosedJaxpr,
    equations: Iterable[Any],
    needed: Container[Any],
    received: Sequence[Var],
    returns: Sequence[int],
    sent: Sequence[Var],
) -> ProgramPart:
    """Build a part of a program.

    Args:
      closed: the whole program, whose constants the part has too.
      equations: the equations of the part.
      needed: all values that they or the outputs read.
      received, returns, sent: see `ProgramPart`.
    """
    whole, kept = closed.jaxpr, list(equations)
    reads = tuple(n for n, v in enumerate(whole.invars) if v in needed)
    jaxpr = whole.replace(
        invars=[*(whole.invars[n] for n in reads), *received],
        outvars=[*(whole.outvars[n] for n in returns), *sent],
        eqns=kept,
        effects=frozenset().union(*(each.effects for each in kept)),
    )
    return ProgramPart(
        closed=ClosedJaxpr(jaxpr, closed.consts),
        reads=reads,
        received=tuple(received),
        returns=tuple(returns),
        sent=tuple(sent),
    )


def cut_program(closed: ClosedJaxpr, part_of: Sequence[int], num_parts: int) -> list[ProgramPart]:
    """Cut a program.

    Args:
      closed: without effects.
      part_of: the part of each output, from 0; outputs of part -1 are dropped.
      num_parts: number of parts.
    """
    jaxpr, computed = closed.jaxpr, set[int]()
    parts = range(num_parts)
    returns = [tuple(n for n, each in enumerate(part_of) if each == part) for part in parts]
    equations, needed = [], []

    # the first part that needs an equation computes it; what is cheap to repeat, each of them
    def choose(number: int, equation: Any, is_needed: bool) -> bool:
        return is_needed and (number not in computed or is_repeated(equation))

    for each in returns:
        outputs = [jaxpr.outvars[n] for n in each]
        found, values = select_equations(closed, outputs, choose)
        computed.update(found)
        equations.append(found.values())
        needed.append(values)
    own = [{v for equation in each for v in equation.outvars} for each in equations]
    others = {*jaxpr.invars, *jaxpr.constvars}
    # what a part needs and does not make is an input, a constant, or made by an earlier one
    received = [[v for v in needed[p] if v not in own[p] and v not in others] for p in parts]
    maker = {v: part for part in reversed(parts) for v in own[part]}
    sent: list[dict[Var, None]] = [{} for _ in parts]
    for v in (v for each in received for v in each):
        sent[maker[v]][v] = None
    return [
        build_part(closed, equations[p], needed[p], received[p], returns[p], list(sent[p])) for p in parts
    ]


def is_repeated(equation: Any) -> bool:
    """Return whether an equation only makes a larger array from its inputs."""

    def num_bytes(variables: Sequence[Any]) -> int:
        return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)

    return equation.primitive.name in REPEATED and num_bytes(equation.outvars) > num_bytes(equation.invars)
