"""Replace the calls in a traced program by what they call, so that it can be cut inside them.

Next: `program.py`.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Equations that only call a program -> the name of the program among their parameters."""

REMATS = ("remat2", "checkpoint")
"""Calls whose backward computes them again. They stay whole unless they hold most of the parameters."""


class Inliner:
    """Evaluates a program with its calls replaced by what they call.

    Args:
      sizes_bytes: of each weight; they come first among the inputs.
    """

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self._sizes_bytes = sizes_bytes

    def run(self, traced: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Return what the program returns."""
        numbers = range(len(self._sizes_bytes))
        of_rest = [None] * (len(inputs) - len(numbers))
        return self._run(traced, inputs, [*(frozenset([number]) for number in numbers), *of_rest])[0]

    def _run(
        self, traced: ClosedJaxpr, inputs: Sequence[Any], roots: Sequence[frozenset[int] | None]
    ) -> tuple[list[Any], list[frozenset[int] | None]]:
        """Return the outputs, and for each the weights of which it is made; None if of the batch too."""
        jaxpr = traced.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))
        made_of: dict[Any, frozenset[int] | None] = dict(zip(jaxpr.invars, roots, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else values[v]

        def weights(v: Any) -> frozenset[int] | None:
            return frozenset() if isinstance(v, Literal) else made_of.get(v, frozenset())

        for equation in jaxpr.eqns:
            found = [weights(v) for v in equation.invars]
            called = self._called(equation, frozenset().union(*(each for each in found if each)))
            if called is not None:
                outputs, sources = self._run(called, [read(v) for v in equation.invars], found)
            else:
                outputs = _evaluated(jaxpr, equation, [read(v) for v in equation.invars])
                alone = [each for each in found if each is not None]
                joined = None if len(alone) < len(found) else frozenset[int]().union(*alone)
                sources = [joined] * len(outputs)
            values |= dict(zip(equation.outvars, outputs, strict=True))
            made_of |= dict(zip(equation.outvars, sources, strict=True))
        return [read(v) for v in jaxpr.outvars], [weights(v) for v in jaxpr.outvars]

    def _called(self, equation: JaxprEqn, read: frozenset[int]) -> ClosedJaxpr | None:
        """Return the program to evaluate in place of a call; None for one equation that stays as it is."""
        if len(read) < 2:
            return None
        name = equation.primitive.name
        if name in CALLS:
            return equation.params[CALLS[name]]
        if name in REMATS and 2 * sum(self._sizes_bytes[n] for n in read) > sum(self._sizes_bytes):
            return ClosedJaxpr(equation.params["jaxpr"], ())
        return None


def _evaluated(jaxpr: Jaxpr, equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of one equation of a program, with its own derivative rule if it has one."""
    given = [Var(v.aval) for v in equation.invars]
    alone = jaxpr.replace(
        constvars=[],
        invars=given,
        outvars=equation.outvars,
        eqns=[equation.replace(invars=[*given])],
        effects=equation.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*inputs)
