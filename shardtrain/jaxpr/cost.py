"""Count the flops of single equations, and the cost of programs and of each of their outputs.

Costs divide a program into parts of about equal cost. Next: `cut.py`, which cuts it.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from shardtrain.jaxpr.equations import list_programs
from shardtrain.jaxpr.forward import forward


def count_flops(equation: Any) -> float:
    """Return the flops of a matrix product or a convolution; 0 for any other equation."""
    name, params = equation.primitive.name, equation.params
    size = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
    shapes = [v.aval.shape for v in equation.invars[:2]]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * size * math.prod(shapes[0][dim] for dim in contracted)
    if name == "ragged_dot_general":
        # each row is of one group
        return 2.0 * math.prod(shapes[0]) * equation.outvars[0].aval.shape[-1]
    if name == "conv_general_dilated":
        window = math.prod(shapes[1][dim] for dim in params["dimension_numbers"].rhs_spec[1:])
        # zeros between the elements of the input, in the gradient of a strided convolution, are no work
        return 2 * size * window / math.prod(params["lhs_dilation"])
    return 0.0


def equation_cost(equation: Any) -> float:
    """Return the cost of an equation: 2 per multiply-add of a product, 1 per element of other results.

    A scan costs all of its steps; a loop with an unknown number of steps costs one step.
    """
    size = float(sum(math.prod(v.aval.shape) for v in equation.outvars))
    if inner := list(map(program_cost, list_programs(equation))):
        # of the branches of a conditional one is run
        each = max(inner) if equation.primitive.name == "cond" else sum(inner)
        # the program of a scatter or a reduction is what is done with two elements
        return max(size, each * equation.params.get("length", 1))
    return count_flops(equation) or size


def program_cost(closed: ClosedJaxpr) -> float:
    """Return the sum of the costs of its equations.

    >>> import jax
    >>> x, y = jax.numpy.ones((2, 3)), jax.numpy.ones((3, 4))
    >>> program_cost(jax.make_jaxpr(lambda x, y: -(x @ y))(x, y))  # 2 * 2 * 3 * 4, and 2 * 4
    56.0
    """
    return sum(map(equation_cost, closed.eqns))


def estimate_ready_costs(closed: ClosedJaxpr) -> list[float]:
    """Return the cost of computing each output of a program."""
    costs: list[float] = []

    def add(equation: Any, ancestors: list[int]) -> list[int]:
        found = 1 << len(costs)
        for each in ancestors:
            found |= each
        costs.append(equation_cost(equation))
        return [found] * len(equation.outvars)

    outputs = forward(closed, [0] * len(closed.in_avals), add, lambda _: 0)
    known = {
        found: sum(cost for number, cost in enumerate(costs) if found >> number & 1)
        for found in dict.fromkeys(outputs)
    }
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
