"""Count which inputs of a traced scan are constants, which are carried and which are stacked."""

from collections.abc import Sequence
from typing import Any


def scan_counts(equation: Any) -> tuple[int, int]:
    """Count the constants and the carried arrays of a scan: its inputs are these, and then the stacked ones.

    They are counted by shapes, as jax 0.10 and 0.11 hold the counts in different parameters.

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
    num_carried = _count_whole(equation.outvars, body.outvars)
    return _count_whole(equation.invars, body.invars) - num_carried, num_carried


def _count_whole(of_scan: Sequence[Any], of_step: Sequence[Any]) -> int:
    """Count the arrays that a step reads or writes whole: a stacked one has a dim more than its rows."""
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(of_scan, of_step, strict=True))
