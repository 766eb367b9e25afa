"""Equations of a traced program, and of the programs in it, with their constants and lines."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardtrain.errors.user_code import FOLDER, is_users


class TracedEquation(NamedTuple):
    """An equation of a program, or of a program in it.

    Args:
      equation: jax's.
      constants: its inputs that are constants, numbers and arrays.
      outer: the equations that it is in, the outermost first.
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


def equations(closed: Any) -> list[TracedEquation]:
    """Return all equations of a program, a ClosedJaxpr; those of an inner one after the one that it is in."""
    return _equations(closed.jaxpr, closed.consts, ())


def _equations(jaxpr: Any, consts: Sequence[Any], outer: tuple[Any, ...]) -> list[TracedEquation]:
    values = dict(zip(jaxpr.constvars, consts, strict=False))
    found: list[TracedEquation] = []
    for equation in jaxpr.eqns:
        variables = [v for v in equation.invars if not isinstance(v, Literal)]
        constants = [v.val for v in equation.invars if isinstance(v, Literal)]
        constants += [values[v] for v in variables if v in values]
        found.append(TracedEquation(equation, constants, outer))
        for inner, inner_consts in _inner(equation.params.values()):
            found += _equations(inner, inner_consts, (*outer, equation))
    return found


def _inner(parameters: Iterable[Any]) -> list[tuple[Any, Sequence[Any]]]:
    """Return the programs among the parameters of an equation, each with its constants."""
    found: list[tuple[Any, Sequence[Any]]] = []
    for value in parameters:
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                found.append((each.jaxpr, each.consts))
            elif isinstance(each, Jaxpr):
                found.append((each, ()))
    return found
