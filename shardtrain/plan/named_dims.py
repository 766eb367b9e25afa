"""Rules that derive the dim names of an operation's outputs from the dim names of its inputs. No jax.

Each rule also returns the names of the dims that the operation sums over. Next: `jaxpr_walk.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardtrain.axes import EXPERTS
from shardtrain.plan.program import ARRIVED, EXPERT_SLOTS, Dims

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
"""Operations along a dim that each device needs as a whole."""

SLOTS = (EXPERTS, ARRIVED)
"""The dims that `EXPERT_SLOTS` joins."""


class Operands(NamedTuple):
    """The inputs of one operation.

    Args:
      dims: names of the dims of each input.
      shapes: shape of each input.
      params: parameters of the operation in jax.
      out_shapes: shape of each output.
    """

    dims: Sequence[Dims]
    shapes: Sequence[tuple[int, ...]]
    params: Mapping[str, Any]
    out_shapes: Sequence[tuple[int, ...]]


class OutputNames(NamedTuple):
    """The names of an operation's outputs.

    Args:
      outputs: names of the dims of each output.
      summed: names of the dims that it sums over.
      flops: flops of a matrix product or a convolution.
      grouped: names of dims that its work does not grow with, as each row belongs to one group.
    """

    outputs: tuple[Dims, ...]
    summed: tuple[str, ...] = ()
    flops: float = 0.0
    grouped: tuple[str, ...] = ()


REDUCTIONS = frozenset(
    (
        *("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod"),
        *("reduce_sum", "reduce_xor"),
    )
)
"""Operations that reduce over the dims of their parameter `axes`."""


def find_names(primitive: str, operands: Operands) -> OutputNames:
    """Return the dim names of an operation's outputs; a dim is None if no input names it.

    >>> of_dot = Operands([("batch", "embed"), ("embed", "mlp")], [(8, 4), (4, 16)],
    ...                   {"dimension_numbers": (((1,), (0,)), ((), ()))}, [(8, 16)])
    >>> find_names("dot_general", of_dot)
    OutputNames(outputs=(('batch', 'mlp'),), summed=('embed',), flops=1024, grouped=())
    """
    rule = _reduce if primitive in REDUCTIONS else RULES.get(primitive, _name_like_inputs)
    return rule(operands)


def merge_names(*several: Dims) -> Dims:
    """Return the first name of each dim among several arrays.

    >>> merge_names((None, "seq"), ("batch", "embed"))
    ('batch', 'seq')
    """
    return tuple(next((name for name in names if name), None) for names in zip(*several, strict=True))


def _name_like_inputs(operands: Operands) -> OutputNames:
    """Name the outputs of elementwise operations as the inputs of the same rank and size."""
    found = []
    for shape in operands.out_shapes:
        alike = [
            tuple(name if size == out else None for name, size, out in zip(dims, given, shape, strict=True))
            for dims, given in zip(operands.dims, operands.shapes, strict=True)
            if len(given) == len(shape)
        ]
        found.append(merge_names(*alike) if alike else (None,) * len(shape))
    return OutputNames(tuple(found))


def _name_like_first(operands: Operands) -> OutputNames:
    """Name the outputs of slices, padding and sorting as the first input; sizes may change."""
    first = operands.dims[0]
    return OutputNames(
        tuple(first if len(first) == len(shape) else (None,) * len(shape) for shape in operands.out_shapes)
    )


def _name_like_last(operands: Operands) -> OutputNames:
    """Name the gradient of a pooling as the pooled array."""
    return OutputNames((operands.dims[-1],))


def _join(operands: Operands) -> OutputNames:
    return OutputNames((merge_names(*operands.dims),))


def _update(operands: Operands) -> OutputNames:
    """Name an array into which a part is written by the names of both."""
    array, part = operands.dims[0], operands.dims[1]
    return OutputNames((merge_names(array, part) if len(array) == len(part) else array,))


def _broadcast(operands: Operands) -> OutputNames:
    (shape,) = operands.out_shapes
    names: list[str | None] = [None] * len(shape)
    for i, to in enumerate(operands.params["broadcast_dimensions"]):
        if operands.shapes[0][i] == shape[to]:
            names[to] = operands.dims[0][i]
    return OutputNames((tuple(names),))


def _transpose(operands: Operands) -> OutputNames:
    return OutputNames((tuple(operands.dims[0][i] for i in operands.params["permutation"]),))


def _squeeze(operands: Operands) -> OutputNames:
    gone = {i % len(operands.dims[0]) for i in operands.params["dimensions"]}
    return OutputNames((tuple(name for i, name in enumerate(operands.dims[0]) if i not in gone),))


def _reshape(operands: Operands) -> OutputNames:
    """Name the first dim of each group of merged or split dims by the first name of the group."""
    given, shape, names = operands.shapes[0], operands.out_shapes[0], operands.dims[0]
    found: list[str | None] = [None] * len(shape)
    i = j = 0
    while i < len(given) and j < len(shape):
        first_in, first_out = i, j
        left, right = given[i], shape[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * given[i], i + 1
            else:
                right, j = right * shape[j], j + 1
        inside = [k for k in range(first_in, i) if given[k] > 1]
        results = [k for k in range(first_out, j) if shape[k] > 1]
        if tuple(names[k] for k in inside) == SLOTS and len(results) == 1:
            found[results[0]] = EXPERT_SLOTS
            continue
        if [names[k] for k in inside] == [EXPERT_SLOTS] and len(results) == 2:
            found[results[0]], found[results[1]] = SLOTS
            continue
        name = next((names[k] for k in inside if names[k]), None)
        to = next((k for k in range(first_out, j) if shape[k] > 1), first_out)
        found[to] = name
    return OutputNames((tuple(found),))


def _reduce(operands: Operands) -> OutputNames:
    over = set(operands.params["axes"])
    kept = tuple(name for i, name in enumerate(operands.dims[0]) if i not in over)
    summed = tuple(name for i, name in enumerate(operands.dims[0]) if i in over and name)
    return OutputNames((kept,) * len(operands.out_shapes), summed)


def _dot(operands: Operands) -> OutputNames:
    left, right = operands.dims
    (contract_left, contract_right), (batch_left, batch_right) = operands.params["dimension_numbers"]
    batch = [left[i] or right[j] for i, j in zip(batch_left, batch_right, strict=True)]
    free = [left[i] for i in range(len(left)) if i not in (*contract_left, *batch_left)]
    free += [right[j] for j in range(len(right)) if j not in (*contract_right, *batch_right)]
    summed = [left[i] or right[j] for i, j in zip(contract_left, contract_right, strict=True)]
    size = math.prod(operands.shapes[0][i] for i in contract_left)
    return OutputNames(
        ((*batch, *free),),
        tuple(name for name in summed if name),
        2 * math.prod(operands.out_shapes[0]) * size,
    )


def _name_ragged(operands: Operands) -> OutputNames:
    """Name the product of sorted rows with the kernel of their group; for its gradient, with other rows."""
    left, right = operands.dims[:2]
    rows, features = operands.shapes[0]
    flops = 2 * rows * features * operands.out_shapes[0][-1]
    if len(right) == 3:
        # the rows' features are the kernel's second dim; or its third, for the gradient of the rows
        ((_, (contracted,)), _) = operands.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        free = right[3 - contracted]
        return OutputNames(
            ((left[0], free),), tuple(filter(None, left[1:2])), flops, tuple(filter(None, right[:1]))
        )
    of_groups = operands.dims[2][0]
    summed, groups = (tuple(filter(None, (each,))) for each in (left[0], of_groups))
    return OutputNames(((of_groups, left[1], right[1]),), summed, flops, groups)


def _convolution(operands: Operands) -> OutputNames:
    left, right = operands.dims
    numbers = operands.params["dimension_numbers"]
    # (batch, features, spatial...), (output features, input features, spatial...), as the input
    of_left, of_right, of_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    names: list[str | None] = [None] * len(operands.out_shapes[0])
    names[of_out[0]] = left[of_left[0]]
    names[of_out[1]] = right[of_right[0]]
    for at, to in zip(of_left[2:], of_out[2:], strict=True):
        names[to] = left[at]
    window = math.prod(operands.shapes[1][i] for i in of_right[1:])
    summed = left[of_left[1]] or right[of_right[1]]
    # zeros between the elements of the input, in the gradient of a strided convolution, are no work
    flops = 2 * math.prod(operands.out_shapes[0]) * window / math.prod(operands.params["lhs_dilation"])
    return OutputNames((tuple(names),), (summed,) if summed else (), flops)


def _gather(operands: Operands) -> OutputNames:
    """Name looked up rows by the dims of the rows and of the indices."""
    array, indices = operands.dims[:2]
    numbers = operands.params["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    rows = [name for i, name in enumerate(array) if i not in gone]
    found: list[str | None] = [None] * len(operands.out_shapes[0])
    others = [i for i in range(len(found)) if i not in numbers.offset_dims]
    for at, name in zip(numbers.offset_dims, rows, strict=False):
        found[at] = name
    for at, name in zip(others, indices[:-1], strict=False):
        found[at] = name
    return OutputNames((tuple(found),), tuple(array[i] for i in numbers.collapsed_slice_dims if array[i]))


def _scatter(operands: Operands) -> OutputNames:
    array, _, updates = operands.dims
    numbers = operands.params["dimension_numbers"]
    kept = [i for i in range(len(array)) if i not in numbers.inserted_window_dims]
    found = list(array)
    for at, window in zip(kept, numbers.update_window_dims, strict=False):
        found[at] = found[at] or updates[window]
    others = [name for i, name in enumerate(updates) if i not in numbers.update_window_dims and name]
    return OutputNames((tuple(found),), tuple(others))


RULES: Mapping[str, Callable[[Operands], OutputNames]] = {
    **dict.fromkeys(
        (
            *("cumsum", "dynamic_slice", "pad", "reduce_window", "reduce_window_max", "reduce_window_min"),
            *("reduce_window_sum", "rev", "slice", "sort", "select_and_gather_add", "split"),
        ),
        _name_like_first,
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": _join,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_update_slice": _update,
    "gather": _gather,
    "ragged_dot_general": _name_ragged,
    "reshape": _reshape,
    "scatter-add": _scatter,
    "scatter": _scatter,
    "select_and_scatter_add": _name_like_last,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
"""Operation -> its rule; `_name_like_inputs` is the rule of any other operation."""
