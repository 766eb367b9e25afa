"""Follow the dims of arrays through single equations: where each dim goes, what is mixed, what is summed.

Next: `checks/row_positions.py` and `plan/named_dims.py`, which follow rows and names by these tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

Moves = Mapping[int, int]
"""Dim of an input -> the same dim of the output; other dims are reduced, or new."""

REDUCTIONS = frozenset(
    (
        *("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod"),
        *("reduce_sum", "reduce_xor"),
    )
)
"""Primitives that reduce over the dims of their parameter `axes`."""

OPAQUE = (
    *("custom_linear_solve", "ffi_call", "pallas_call", "ragged_dot_general", "reshape", "scatter"),
    "scatter-add",
)
"""Primitives through which dims are not followed."""


def find_moves(equation: Any, number: int, output: int = 0) -> Moves:
    """Return where the dims of an input are in an output.

    Args:
      equation: any equation; an unknown one keeps its dims.
      number: the number of the input.
      output: the number of the output.

    >>> import jax
    >>> product = jax.make_jaxpr(lambda x, y: x @ y)(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 4))).eqns[0]
    >>> find_moves(product, 0), find_moves(product, 1)
    ({0: 0}, {1: 1})
    """
    name = equation.primitive.name
    if name in OPAQUE:
        return {}
    if name in REDUCTIONS:
        return _remove(equation, equation.params["axes"])
    if name in MOVES:
        return MOVES[name](equation, number)
    before, after = (
        getattr(v.aval, "shape", ()) for v in (equation.invars[number], equation.outvars[output])
    )
    return (
        {dim: dim for dim in range(len(before)) if before[dim] == after[dim]}
        if len(before) == len(after)
        else {}
    )


def _remove(equation: Any, dims: Sequence[int]) -> Moves:
    ndim = equation.invars[0].aval.ndim
    gone = {dim % ndim for dim in dims}
    return {dim: to for to, dim in enumerate(dim for dim in range(ndim) if dim not in gone)}


def _broadcast(equation: Any, number: int) -> Moves:
    before, after = equation.invars[0].aval.shape, equation.params["shape"]
    moves = enumerate(equation.params["broadcast_dimensions"])
    return {dim: to for dim, to in moves if before[dim] == after[to]}


def _dot(equation: Any, number: int) -> Moves:
    contracted, batch = equation.params["dimension_numbers"]
    free = [
        [dim for dim in range(equation.invars[i].aval.ndim) if dim not in (*contracted[i], *batch[i])]
        for i in range(2)
    ]
    begin = len(batch[0]) + len(free[0]) * number
    return {dim: to for to, dim in enumerate(batch[number])} | {
        dim: begin + to for to, dim in enumerate(free[number])
    }


def _convolve(equation: Any, number: int) -> Moves:
    left, right, out = equation.params["dimension_numbers"]
    # (batch, features, spatial...), (output features, input features, spatial...), as the input
    return {right[0]: out[1]} if number else {left[0]: out[0], **dict(zip(left[2:], out[2:], strict=True))}


def _gather(equation: Any, number: int) -> Moves:
    numbers = equation.params["dimension_numbers"]
    others = [i for i in range(equation.outvars[0].aval.ndim) if i not in numbers.offset_dims]
    if number == 1:
        return dict(enumerate(others))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(equation.invars[0].aval.ndim) if dim not in gone]
    at = dict(zip(kept, numbers.offset_dims, strict=True))
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return at | {dim: others[index] for dim, index in batching}


MOVES: Mapping[str, Callable[[Any, int], Moves]] = {
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolve,
    "dot_general": _dot,
    "gather": _gather,
    "squeeze": lambda equation, _: _remove(equation, equation.params["dimensions"]),
    "transpose": lambda equation, _: {dim: to for to, dim in enumerate(equation.params["permutation"])},
    "unstack": lambda equation, _: _remove(equation, (equation.params["axis"],)),
}
"""Primitive -> how its dims move."""


def find_reshaped(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the dims that a reshape joins and those that it makes of them, as few as there can be.

    Dims of size 1 are in none; an array without elements has none.

    >>> list(find_reshaped((8, 6, 1, 4), (8, 2, 3, 4)))
    [([0], [0]), ([1], [1, 2]), ([3], [3])]
    """
    given, made = ([dim for dim, size in enumerate(shape) if size > 1] for shape in (before, after))
    while given and 0 not in before:
        sides = [given[:1], made[:1]]
        while (left := prod(before[dim] for dim in sides[0])) != (
            right := prod(after[dim] for dim in sides[1])
        ):
            if left < right:
                sides[0] = given[: len(sides[0]) + 1]
            else:
                sides[1] = made[: len(sides[1]) + 1]
        yield sides[0], sides[1]
        given, made = given[len(sides[0]) :], made[len(sides[1]) :]


def find_mixed(equation: Any) -> set[int]:
    """Return the dims of the first input along which an operation mixes entries or moves them."""
    name, params = equation.primitive.name, equation.params
    ndim = getattr(equation.invars[0].aval, "ndim", 0) if equation.invars else 0
    if name in ("concatenate", "sort", "rev") or name.startswith("cum"):
        return set(params.get("dimensions", (params.get("dimension", params.get("axis")),)))
    if name == "top_k":
        return {ndim - 1}
    if name == "conv_general_dilated":
        return set(params["dimension_numbers"].lhs_spec[2:])
    if name.startswith("reduce_window"):
        return {dim for dim, size in enumerate(params["window_dimensions"]) if size > 1}
    if name == "fft":
        return set(range(ndim - len(params["fft_lengths"]), ndim))
    return {dim for dim, each in enumerate(params["padding_config"]) if any(each)} if name == "pad" else set()


def find_summed(equation: Any) -> list[Mapping[int, int]]:
    """Return the dims that an operation sums over or looks up, each as number of an input -> its dim."""
    name, params = equation.primitive.name, equation.params
    if name in REDUCTIONS:
        return [{0: dim} for dim in params["axes"]]
    if name == "dot_general":
        return [dict(enumerate(both)) for both in zip(*params["dimension_numbers"][0], strict=True)]
    if name == "conv_general_dilated":
        left, right, _ = params["dimension_numbers"]
        return [{0: left[1], 1: right[1]}]
    return [{0: dim} for dim in params["dimension_numbers"].collapsed_slice_dims] if name == "gather" else []
