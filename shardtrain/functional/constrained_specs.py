"""Read the sharding constraints on the outputs of a traced program."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from shardtrain.functional.jaxpr_split import INLINED

SAME = ("optimization_barrier",)
"""Primitives whose results are their inputs."""


def find_constrained_specs(program: Any) -> list[PartitionSpec | None]:
    """Return the spec that a program constrains each of its outputs to; None where it says nothing.

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
    return _specs(program, program.outvars)


def _specs(program: Any, variables: Sequence[Any]) -> list[PartitionSpec | None]:
    made = {variable: (each, i) for each in program.eqns for i, variable in enumerate(each.outvars)}
    found: list[PartitionSpec | None] = []
    for variable in variables:
        equation, number = (None, 0) if isinstance(variable, Literal) else made.get(variable, (None, 0))
        found.append(None if equation is None else _spec(program, equation, number))
    return found


def _spec(program: Any, equation: Any, number: int) -> PartitionSpec | None:
    name = equation.primitive.name
    if name == "sharding_constraint":
        return equation.params["sharding"].spec
    if name in SAME:
        return _specs(program, [equation.invars[number]])[0]
    # of a loop what its last trip returns, as long as it stacks nothing
    body = equation.params.get(INLINED.get(name, "jaxpr" if name == "scan" else ""))
    if body is None:
        return None
    inner = getattr(body, "jaxpr", body)
    if inner.outvars[number].aval.shape != equation.outvars[number].aval.shape:
        return None
    return _specs(inner, [inner.outvars[number]])[0]
