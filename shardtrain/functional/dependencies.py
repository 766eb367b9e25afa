"""Which inputs of a traced program each of its outputs depends on, through loops and branches."""

from collections.abc import Sequence
from typing import Any

from shardtrain.functional.scan_operands import scan_counts

CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters that hold the computation that an operation stands for."""


def dependencies(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """Return the groups of inputs that each output depends on, as bits.

    Args:
      jaxpr: the program.
      inputs: the groups of each of its inputs, as bits.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda a, b: (a * 2, a + b))(1.0, 2.0).jaxpr
    >>> dependencies(jaxpr, [0b01, 0b10])
    [1, 3]
    """
    known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return 0 if hasattr(atom, "val") else known.get(atom, 0)

    for equation in jaxpr.eqns:
        found = _follow(equation, [of(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _follow(equation: Any, inputs: list[int]) -> list[int]:
    """Return the same of the outputs of one operation."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        branches = [dependencies(each.jaxpr, inputs[1:]) for each in params["branches"]]
        return [inputs[0] | _union(found) for found in zip(*branches, strict=True)]
    if name == "scan":
        consts, carried = scan_counts(equation)
        return _loop(params["jaxpr"].jaxpr, inputs, consts, carried)
    if name == "while":
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        number = len(inputs) - of_condition - of_body
        found = _loop(params["body_jaxpr"].jaxpr, inputs[of_condition:], of_body, number)
        (stops,) = dependencies(params["cond_jaxpr"].jaxpr, [*inputs[:of_condition], *found])
        return [each | stops for each in found]
    inner: Any = next((params[key] for key in CALLED if key in params), None)
    jaxpr: Any = getattr(inner, "jaxpr", inner)
    if jaxpr is None or len(jaxpr.invars) > len(inputs) or len(jaxpr.outvars) != len(equation.outvars):
        return [_union(inputs)] * len(equation.outvars)
    return dependencies(jaxpr, inputs[len(inputs) - len(jaxpr.invars) :])


def _loop(body: Any, inputs: list[int], consts: int, carried: int) -> list[int]:
    """Run the body until what is carried depends on nothing more."""
    given = list(inputs)
    while True:
        found = dependencies(body, given)
        grown = [old | new for old, new in zip(given[consts : consts + carried], found, strict=False)]
        if grown == given[consts : consts + carried]:
            return [*grown, *found[carried:]]
        given[consts : consts + carried] = grown


def _union(groups: Sequence[int]) -> int:
    total = 0
    for each in groups:
        total |= each
    return total
