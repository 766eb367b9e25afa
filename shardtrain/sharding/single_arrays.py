"""Shardings of single parameters and operators, in place of the rules of a layout. No jax.

Next: `layout.py`, which has them; `jaxpr/operators.py`, which applies them.
"""

import math
from collections.abc import Mapping

from shardtrain import axes
from shardtrain.errors.messages import near

Shards = Mapping[str, str]
"""Mesh axis -> the dim that it splits: "1", of an array, or "sum0", a dim that an operator sums over."""

OPERATOR_AXES = (axes.DATA, axes.FSDP, axes.TENSOR)
"""Axes that may split single arrays. Models and rules decide what others split."""


def is_operator(name: str) -> bool:
    """Return whether a key of a table names an operator, as `up/kernel:dot_general`, or a parameter."""
    return ":" in name


def find_axes(dim: str, shards: Shards) -> tuple[str, ...]:
    """Return the axes that split a dim.

    >>> find_axes("0", {"data": "0", "fsdp": "1", "tensor": "0"})
    ('data', 'tensor')
    """
    return tuple(axis for axis, split in shards.items() if split == dim)


def find_form_problems(operators: Mapping[str, object]) -> list[str]:
    """List why a table is no table of shards, one sentence each."""
    problems = []
    for name, shards in operators.items():
        if not (isinstance(shards, Mapping) and all(isinstance(dim, str) for dim in shards.values())):
            problems.append(f"operators.{name!r} is {shards!r}; write axes and dims, {{tensor = '1'}}")
            continue
        unknown = [str(axis) for axis in shards if axis not in OPERATOR_AXES]
        problems += [f"operators.{name!r}: axis {near(axis, OPERATOR_AXES)}" for axis in unknown]
    return problems


def find_shard_problems(
    name: str, dims: Mapping[str, int], shards: Shards, sizes: Mapping[str, int]
) -> list[str]:
    """List why shards do not fit an array or an operator, one sentence each.

    Args:
      name: its name.
      dims: size of each dim.
      shards: the shards.
      sizes: axis -> size.

    >>> find_shard_problems("up", {"0": 6}, {"tensor": "1"}, {"tensor": 4})
    ["up: tensor splits dim '1' (known: 0)"]
    """
    wrong = [(axis, dim) for axis, dim in shards.items() if dim not in dims]
    problems = [f"{name}: {axis} splits dim {near(dim, dims)}" for axis, dim in wrong]
    for dim, size in dims.items():
        over = find_axes(dim, shards)
        total = math.prod(sizes[axis] for axis in over)
        if size % total:
            problems.append(
                f"{name}: dim {dim!r} of size {size} cannot be split over axes {list(over)} of total size"
                f" {total}: {size} % {total} = {size % total}. Use a total of {math.gcd(size, total)}, or"
                f" another of its dims: {', '.join(dims)}"
            )
    return problems
