"""Read the equations of traced programs: source lines, constants, the programs that they contain or run.

Next: `forward.py`, which follows values through a program.
"""

import os
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardtrain.errors.user_code import FOLDER, is_users

T = TypeVar("T")

CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "body_jaxpr")
"""Parameters of an equation that hold the program that it runs on its last inputs."""

OPAQUE = ("pallas_call", "reduce", "reduce_window")
"""Primitives whose program is a kernel, or of single elements."""

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that only run a program, once."""

REMATS = ("remat2", "checkpoint")
"""Primitives whose program runs again in the backward pass."""

CUSTOM_JVP = "custom_jvp_call"
"""The primitive of a program with a derivative of its own."""


class TracedEquation(NamedTuple):
    """An equation of a program, or of a program inside it.

    Args:
      equation: jax's equation.
      constants: its inputs that are constants, numbers and arrays.
      outer: the equations that contain it, the outermost first.
    """

    equation: Any
    constants: list[Any]
    outer: tuple[Any, ...]

    @property
    def line(self) -> str:
        """The file and line of the user's code that has the operation."""
        found = "?"
        for each in (*self.outer, self.equation):
            found = find_line(each) or found
            # functions of jax are traced once, and keep the lines of the call for which they were
            name = each.params["name"] if each.primitive.name == "jit" else ""
            if name.startswith("_") and not name.startswith("__"):
                break
        return found


def find_line(equation: Any) -> str | None:
    """Return the file and line of the model or the loss that has an operation; None if unknown."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace else ():
        if is_users(frame.file_name) or frame.file_name.startswith(f"{FOLDER}models{os.sep}"):
            return f"{frame.file_name}:{frame.line_num}"
    return None


def list_equations(closed: ClosedJaxpr) -> list[TracedEquation]:
    """List all equations of a program; those of an inner program follow the equation that contains it."""
    return _collect_equations(closed.jaxpr, closed.consts, ())


def _collect_equations(jaxpr: Any, consts: Sequence[Any], outer: tuple[Any, ...]) -> list[TracedEquation]:
    values = dict(zip(jaxpr.constvars, consts, strict=False))
    found: list[TracedEquation] = []
    for equation in jaxpr.eqns:
        variables = [v for v in equation.invars if not isinstance(v, Literal)]
        constants = [v.val for v in equation.invars if isinstance(v, Literal)]
        constants += [values[v] for v in variables if v in values]
        found.append(TracedEquation(equation, constants, outer))
        for inner in list_programs(equation):
            found += _collect_equations(inner.jaxpr, inner.consts, (*outer, equation))
    return found


def find_difference(
    once: Sequence[TracedEquation],
    again: Sequence[TracedEquation],
    is_same: Callable[[TracedEquation, TracedEquation], bool] = lambda *_: True,
) -> str:
    """Return the line of the first equation at which two programs differ; "" if they are alike.

    Args:
      once, again: all equations of both programs, see `list_equations`.
      is_same: whether two equations with the same operation are alike.
    """
    for one, two in zip(once, again, strict=False):
        a, b = one.equation, two.equation
        if a.primitive is not b.primitive or len(a.outvars) != len(b.outvars) or not is_same(one, two):
            return two.line
    return "" if len(once) == len(again) else max(once, again, key=len)[-1].line


def list_programs(equation: Any) -> list[ClosedJaxpr]:
    """List all programs among the parameters of an equation, also those that it may run, or runs backward."""
    found = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr | Jaxpr):
                found.append(_close(each))
    return found


def _close(program: Any) -> ClosedJaxpr:
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


def find_call(equation: Any, primitives: Container[str] = CALLS) -> ClosedJaxpr | None:
    """Return the program that an equation of one of some primitives runs; None for any other equation."""
    if equation.primitive.name not in primitives:
        return None
    return _close(next(equation.params[key] for key in CALLED if key in equation.params))


def find_runs(equation: Any, inputs: Sequence[T]) -> list[tuple[ClosedJaxpr, Sequence[T]]]:
    """Return the programs that an equation runs, each with its inputs; a conditional may run each branch.

    Args:
      equation: any equation.
      inputs: values for its inputs; a program takes the last ones.

    >>> import jax
    >>> branch = jax.make_jaxpr(lambda i, x: jax.lax.cond(i, jax.numpy.sin, jax.numpy.cos, x))(True, 1.0)
    >>> [given for _, given in find_runs(branch.eqns[-1], ["i", "x"])]
    [['x'], ['x']]
    """
    params = equation.params
    if equation.primitive.name in OPAQUE:
        return []
    found = map(_close, params.get("branches") or [params[key] for key in CALLED if key in params][:1])
    return [
        (each, inputs[len(inputs) - len(each.jaxpr.invars) :])
        for each in found
        if len(each.jaxpr.invars) <= len(inputs) and len(each.jaxpr.outvars) == len(equation.outvars)
    ]


def find_largest_run(equation: Any, inputs: Sequence[T]) -> tuple[ClosedJaxpr, Sequence[T]] | None:
    """Return the program of the most operations that an equation runs, with its inputs; None without one."""
    return max(find_runs(equation, inputs), key=lambda run: len(run[0].eqns), default=None)


def scan_counts(equation: Any) -> tuple[int, int]:
    """Count the constants and the carried arrays of a scan; its other inputs are stacked.

    Shapes decide, because jax 0.10 and 0.11 hold the counts in different parameters.

    Args:
      equation: the equation of a `jax.lax.scan` in a traced program.

    Returns:
      (the number of constants, the number of carried arrays).

    >>> import jax
    >>> def program(w, xs):
    ...     return jax.lax.scan(lambda c, x: (c * w + x, c), xs[0], xs)
    >>> scan_counts(jax.make_jaxpr(program)(2.0, jax.numpy.ones(3)).eqns[-1])
    (1, 1)
    """
    body = equation.params["jaxpr"].jaxpr
    num_carried = _count_unstacked(equation.outvars, body.outvars)
    return _count_unstacked(equation.invars, body.invars) - num_carried, num_carried


def split_operands(equation: Any, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Split values for the inputs of a scan into those of constants, carried arrays and stacked arrays."""
    num_consts, num_carried = scan_counts(equation)
    given, num_whole = list(inputs), num_consts + num_carried
    return given[:num_consts], given[num_consts:num_whole], given[num_whole:]


def _count_unstacked(of_scan: Sequence[Any], of_step: Sequence[Any]) -> int:
    """Count the arrays that a step reads or writes whole: a stacked one has one dim more than its rows."""
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(of_scan, of_step, strict=True))
