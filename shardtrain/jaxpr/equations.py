"""Read traced programs: equations and their source lines, operands of scans, dependencies, constraints."""

import os
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec

from shardtrain.errors.user_code import FOLDER, is_users

CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters of equations that hold the program which the equation calls."""

INLINED = {"jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
"""Primitives that call a program once -> the parameter that holds it."""


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
        for inner, inner_consts in _inner_programs(equation.params.values()):
            found += _collect_equations(inner, inner_consts, (*outer, equation))
    return found


def _inner_programs(parameters: Iterable[Any]) -> list[tuple[Any, Sequence[Any]]]:
    """Return the programs among the parameters of an equation, each with its constants."""
    found: list[tuple[Any, Sequence[Any]]] = []
    for value in parameters:
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                found.append((each.jaxpr, each.consts))
            elif isinstance(each, Jaxpr):
                found.append((each, ()))
    return found


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


def _count_unstacked(of_scan: Sequence[Any], of_step: Sequence[Any]) -> int:
    """Count the arrays that a step reads or writes whole: a stacked one has one dim more than its rows."""
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(of_scan, of_step, strict=True))


def dependencies(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """Return the groups of inputs that each output depends on, as bits, through loops and branches.

    Args:
      jaxpr: the program.
      inputs: the groups of each of its inputs, as bits.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda a, b: (a * 2, a + b))(1.0, 2.0).jaxpr
    >>> dependencies(jaxpr, [0b01, 0b10])
    [1, 3]
    """
    known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else known.get(atom, 0)

    for equation in jaxpr.eqns:
        found = _equation_dependencies(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation_dependencies(equation: Any, inputs: list[int]) -> list[int]:
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        branches = [dependencies(each.jaxpr, inputs[1:]) for each in params["branches"]]
        return [reduce(or_, found, inputs[0]) for found in zip(*branches, strict=True)]
    if name == "scan":
        consts, carried = scan_counts(equation)
        return _loop_dependencies(params["jaxpr"].jaxpr, inputs, consts, carried)
    if name == "while":
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        number = len(inputs) - of_condition - of_body
        found = _loop_dependencies(params["body_jaxpr"].jaxpr, inputs[of_condition:], of_body, number)
        (stops,) = dependencies(params["cond_jaxpr"].jaxpr, [*inputs[:of_condition], *found])
        return [each | stops for each in found]
    inner: Any = next((params[key] for key in CALLED if key in params), None)
    jaxpr: Any = getattr(inner, "jaxpr", inner)
    if jaxpr is None or len(jaxpr.invars) > len(inputs) or len(jaxpr.outvars) != len(equation.outvars):
        return [reduce(or_, inputs, 0)] * len(equation.outvars)
    return dependencies(jaxpr, inputs[len(inputs) - len(jaxpr.invars) :])


def _loop_dependencies(body: Any, inputs: list[int], consts: int, carried: int) -> list[int]:
    """Follow the body of a loop until its carried arrays depend on nothing more."""
    given = list(inputs)
    while True:
        found = dependencies(body, given)
        grown = [old | new for old, new in zip(given[consts : consts + carried], found, strict=False)]
        if grown == given[consts : consts + carried]:
            return [*grown, *found[carried:]]
        given[consts : consts + carried] = grown


def find_constrained_specs(program: Any) -> list[PartitionSpec | None]:
    """Return the spec to which a program constrains each of its outputs; None without a constraint.

    Args:
      program: a jaxpr, without its constants.

    >>> from functools import partial
    >>> import jax
    >>> with jax.set_mesh(jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))):
    ...     of_seq = partial(jax.lax.with_sharding_constraint, shardings=PartitionSpec(None, "context"))
    ...     program = jax.make_jaxpr(lambda x: (jax.jit(of_seq)(x), x))(jax.numpy.ones((2, 4)))
    >>> [spec and tuple(spec) for spec in find_constrained_specs(program.jaxpr)]
    [(None, 'context'), None]
    """
    return [_constrained_spec(program, variable) for variable in program.outvars]


def _constrained_spec(program: Any, variable: Any) -> PartitionSpec | None:
    made = ((each, i) for each in program.eqns for i, output in enumerate(each.outvars) if output is variable)
    equation, number = next(made, (None, 0))
    if equation is None:
        return None
    name = equation.primitive.name
    if name == "sharding_constraint":
        return equation.params["sharding"].spec
    if name == "optimization_barrier":
        return _constrained_spec(program, equation.invars[number])
    # a loop returns what its last trip returns, as long as the output is not stacked
    body = equation.params.get(INLINED.get(name, "jaxpr" if name == "scan" else ""))
    inner: Any = getattr(body, "jaxpr", body)
    if inner is None or inner.outvars[number].aval.shape != equation.outvars[number].aval.shape:
        return None
    return _constrained_spec(inner, inner.outvars[number])
