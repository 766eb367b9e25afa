"""Estimate what the equations of a traced program cost, to compare parts of it: operations on elements."""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def equation_cost(equation: Any) -> float:
    """Return the cost of an equation: 2 for each multiplication and addition of a product, 1 for an element.

    A scan costs its steps; a loop whose number of steps is not known, one of them.
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
    """Return the sum of the costs of its equations."""
    return sum(map(equation_cost, jaxpr.eqns))
