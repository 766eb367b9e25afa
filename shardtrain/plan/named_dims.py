"""The names of dims through the operations of a traced computation. No jax.

Each rule takes the names and shapes of an operation's inputs, and returns the names of its outputs and those
that it sums over. Next: `trace.py`, which walks a computation by them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardtrain.axes import EXPERTS
from shardtrain.plan.program import ARRIVED, EXPERT_SLOTS, Dims

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
"""Operations along a dim for which each device needs all of it."""

SLOTS = (EXPERTS, ARRIVED)
"""The dims that `EXPERT_SLOTS` is of."""


class Operands(NamedTuple):
    """The inputs of one operation.

    Args:
      dims: names of each input's dims.
      shapes: of each input.
      params: of the operation, as jax has them.
      out_shapes: of each output.
    """

    dims: Sequence[Dims]
    shapes: Sequence[tuple[int, ...]]
    params: Mapping[str, Any]
    out_shapes: Sequence[tuple[int, ...]]


class Found(NamedTuple):
    """The names of an operation's outputs.

    Args:
      outputs: names of each output's dims.
      summed: the names that it sums over.
      flops: of a matrix product or a convolution.
      grouped: names of dims that its work is not over, as each row is of one group alone.
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


def find_names(primitive: str, operands: Operands) -> Found:
    """Return the names of an operation's outputs; None where nothing says one.

    >>> of_dot = Operands([("batch", "embed"), ("embed", "mlp")], [(8, 4), (4, 16)],
    ...                   {"dimension_numbers": (((1,), (0,)), ((), ()))}, [(8, 16)])
    >>> find_names("dot_general", of_dot)
    Found(outputs=(('batch', 'mlp'),), summed=('embed',), flops=1024, grouped=())
    """
    rule = _reduce if primitive in REDUCTIONS else RULES.get(primitive, _name_like_inputs)
    return rule(operands)


def apply_delta(*several: Dims) -> Dims:
    """Return, for each dim, the first name that any of them has.

    >>> apply_delta((None, "seq"), ("batch", "embed"))
    ('batch', 'seq')
    """
    return tuple(next((name for name in names if name), None) for names in zip(*several, strict=True))


def _name_like_inputs(operands: Operands) -> Found:
    """Elementwise and the like: an output is named as the inputs of its rank and size."""
    found = []
    for shape in operands.out_shapes:
        alike = [
            tuple(name if size == out else None for name, size, out in zip(dims, given, shape, strict=True))
            for dims, given in zip(operands.dims, operands.shapes, strict=True)
            if len(given) == len(shape)
        ]
        found.append(apply_delta(*alike) if alike else (None,) * len(shape))
    return Found(tuple(found))


def _name_like_first(operands: Operands) -> Found:
    """Slices, padding, sorting: dims keep their names though their sizes may change."""
    first = operands.dims[0]
    return Found(
        tuple(first if len(first) == len(shape) else (None,) * len(shape) for shape in operands.out_shapes)
    )


def _name_like_last(operands: Operands) -> Found:
    """The gradient of a pooling: named as the array that was pooled."""
    return Found((operands.dims[-1],))


def _join(operands: Operands) -> Found:
    return Found((apply_delta(*operands.dims),))


def _update(operands: Operands) -> Found:
    """A part of an array is written: the array and the part name the same dims."""
    array, part = operands.dims[0], operands.dims[1]
    return Found((apply_delta(array, part) if len(array) == len(part) else array,))


def _broadcast(operands: Operands) -> Found:
    (shape,) = operands.out_shapes
    names: list[str | None] = [None] * len(shape)
    for i, to in enumerate(operands.params["broadcast_dimensions"]):
        if operands.shapes[0][i] == shape[to]:
            names[to] = operands.dims[0][i]
    return Found((tuple(names),))


def _transpose(operands: Operands) -> Found:
    return Found((tuple(operands.dims[0][i] for i in operands.params["permutation"]),))


def _squeeze(operands: Operands) -> Found:
    gone = {i % len(operands.dims[0]) for i in operands.params["dimensions"]}
    return Found((tuple(name for i, name in enumerate(operands.dims[0]) if i not in gone),))


def _reshape(operands: Operands) -> Found:
    """Dims that are merged or split together form a group, whose first name the result's first dim takes."""
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
    return Found((tuple(found),))


def _reduce(operands: Operands) -> Found:
    over = set(operands.params["axes"])
    kept = tuple(name for i, name in enumerate(operands.dims[0]) if i not in over)
    summed = tuple(name for i, name in enumerate(operands.dims[0]) if i in over and name)
    return Found((kept,) * len(operands.out_shapes), summed)


def _dot(operands: Operands) -> Found:
    left, right = operands.dims
    (contract_left, contract_right), (batch_left, batch_right) = operands.params["dimension_numbers"]
    batch = [left[i] or right[j] for i, j in zip(batch_left, batch_right, strict=True)]
    free = [left[i] for i in range(len(left)) if i not in (*contract_left, *batch_left)]
    free += [right[j] for j in range(len(right)) if j not in (*contract_right, *batch_right)]
    summed = [left[i] or right[j] for i, j in zip(contract_left, contract_right, strict=True)]
    size = math.prod(operands.shapes[0][i] for i in contract_left)
    return Found(
        ((*batch, *free),),
        tuple(name for name in summed if name),
        2 * math.prod(operands.out_shapes[0]) * size,
    )


def _name_ragged(operands: Operands) -> Found:
    """Rows sorted by group times the kernel of their group; or, for its gradient, times other rows."""
    left, right = operands.dims[:2]
    rows, features = operands.shapes[0]
    flops = 2 * rows * features * operands.out_shapes[0][-1]
    if len(right) == 3:
        # the rows' features are the kernel's second dim; or its third, for the gradient of the rows
        ((_, (contracted,)), _) = operands.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        free = right[3 - contracted]
        groups = tuple(name for name in right[:1] if name)
        return Found(((left[0], free),), tuple(name for name in (left[1],) if name), flops, groups)
    of_groups = operands.dims[2][0]
    summed, groups = (tuple(name for name in (each,) if name) for each in (left[0], of_groups))
    return Found(((of_groups, left[1], right[1]),), summed, flops, groups)


def _convolution(operands: Operands) -> Found:
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
    return Found((tuple(names),), (summed,) if summed else (), flops)


def _gather(operands: Operands) -> Found:
    """Rows of an array by indices: dims of the rows, and those of the indices."""
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
    return Found((tuple(found),), tuple(array[i] for i in numbers.collapsed_slice_dims if array[i]))


def _scatter(operands: Operands) -> Found:
    array, _, updates = operands.dims
    numbers = operands.params["dimension_numbers"]
    kept = [i for i in range(len(array)) if i not in numbers.inserted_window_dims]
    found = list(array)
    for at, window in zip(kept, numbers.update_window_dims, strict=False):
        found[at] = found[at] or updates[window]
    others = [name for i, name in enumerate(updates) if i not in numbers.update_window_dims and name]
    return Found((tuple(found),), tuple(others))


RULES: Mapping[str, Callable[[Operands], Found]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _join,
    "conv_general_dilated": _convolution,
    "cumsum": _name_like_first,
    "dot_general": _dot,
    "dynamic_slice": _name_like_first,
    "dynamic_update_slice": _update,
    "gather": _gather,
    "pad": _name_like_first,
    "ragged_dot_general": _name_ragged,
    "reduce_window": _name_like_first,
    "reduce_window_max": _name_like_first,
    "reduce_window_min": _name_like_first,
    "reduce_window_sum": _name_like_first,
    "reshape": _reshape,
    "rev": _name_like_first,
    "scatter-add": _scatter,
    "scatter": _scatter,
    "slice": _name_like_first,
    "sort": _name_like_first,
    "select_and_gather_add": _name_like_first,
    "select_and_scatter_add": _name_like_last,
    "split": _name_like_first,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
