"""Rules that derive the dim names of an operation's outputs from the dim names of its inputs.

Each rule also returns the names of the dims that the operation sums over. Next: `jaxpr_walk.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardtrain import axes
from shardtrain.jaxpr.cost import count_flops
from shardtrain.jaxpr.dims import find_moves, find_reshaped, find_summed
from shardtrain.plan.program import ARRIVED, EXPERT_SLOTS, Dims

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
"""Operations along a dim that each device needs as a whole."""

SLOTS = (axes.EXPERTS, ARRIVED)
"""The dims that `EXPERT_SLOTS` joins."""


class OutputNames(NamedTuple):
    """The names of an operation's outputs.

    Args:
      outputs: names of the dims of each output.
      summed: names of the dims that it sums over.
      flops: flops of a matrix product or a convolution.
      grouped: names of dims that its work does not grow with, as each row belongs to one group.
      alike: different names of one dim.
    """

    outputs: tuple[Dims, ...]
    summed: tuple[str, ...] = ()
    flops: float = 0.0
    grouped: tuple[str, ...] = ()
    alike: tuple[tuple[str, ...], ...] = ()


def find_names(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    """Return the dim names of an operation's outputs; a dim is None if no input names it.

    Args:
      equation: the operation.
      dims: names of the dims of each input.

    >>> import jax
    >>> product = jax.make_jaxpr(lambda x, y: x @ y)(jax.numpy.ones((8, 4)), jax.numpy.ones((4, 16))).eqns[0]
    >>> find_names(product, [("batch", "embed"), ("embed", "mlp")])
    OutputNames(outputs=(('batch', 'mlp'),), summed=('embed',), flops=1024.0, grouped=(), alike=())
    """
    rule = RULES.get(equation.primitive.name, _follow)
    return rule(equation, dims)._replace(flops=count_flops(equation))


CHANNELS = (axes.CHANNELS_IN, axes.CHANNELS_OUT)


def number_channels(dims: Dims, number: int) -> Dims:
    """Number the channels of a parameter, so that no others have their number.

    >>> number_channels(("height", "width", "channels_in", "channels_out"), 3)
    ('height', 'width', 'channels_in:6', 'channels_out:7')
    """
    numbers = {name: len(CHANNELS) * number + i for i, name in enumerate(CHANNELS)}
    return tuple(f"{name}:{numbers[name]}" if name in numbers else name for name in dims)


def merge_numbers(alike: Iterable[Sequence[str]]) -> Callable[[str], str]:
    """Return what renames dims, so that different names of one dim have one number.

    Args:
      alike: different names of one dim each, with or without numbers.

    >>> rename = merge_numbers([("channels_out:1", "channels_in:6"), ("channels_out:7", "batch")])
    >>> rename("channels_in:6"), rename("channels_out:7"), rename("batch")
    ('channels_in:1', 'channels_out:7', 'batch')
    """
    same: dict[str, str] = {}

    def find(number: str) -> str:
        while number in same:
            number = same[number]
        return number

    def rename(name: str) -> str:
        first, colon, number = name.partition(":")
        return first + colon + find(number)

    for names in alike:
        first, *others = dict.fromkeys(find(name.partition(":")[2]) for name in names if ":" in name) or [""]
        same.update(dict.fromkeys(others, first))
    return rename


def merge_names(*several: Dims) -> Dims:
    """Return the first name of each dim among several arrays.

    >>> merge_names((None, "seq"), ("batch", "embed"))
    ('batch', 'seq')
    """
    return tuple(next((name for name in names if name), None) for names in zip(*several, strict=True))


def _shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(getattr(v.aval, "shape", ())) for v in variables]


def _follow(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    """Name each dim of the outputs by the first named dim of an input that goes there."""
    found, together = [], []
    for output, shape in enumerate(_shapes(equation.outvars)):
        names: list[list[str]] = [[] for _ in shape]
        for number, given in enumerate(dims):
            for dim, to in find_moves(equation, number, output).items():
                names[to] += filter(None, given[dim : dim + 1])
        found.append(tuple(next(iter(each), None) for each in names))
        together += names
    summed = [list(filter(None, (dims[i][dim] for i, dim in each.items()))) for each in find_summed(equation)]
    return OutputNames(
        tuple(found), tuple(each[0] for each in summed if each), alike=_find_alike((*together, *summed))
    )


def _find_alike(several: Sequence[Sequence[str | None]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups with different names."""
    groups = (tuple(dict.fromkeys(filter(None, names))) for names in several)
    return tuple(names for names in groups if len(names) > 1)


def _name_like_first(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    """Name the outputs of slices, padding and sorting as the first input; sizes may change."""
    shapes = _shapes(equation.outvars)
    return OutputNames(
        tuple(dims[0] if len(dims[0]) == len(shape) else (None,) * len(shape) for shape in shapes)
    )


def _name_like_last(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    """Name the gradient of a pooling as the pooled array."""
    return OutputNames((dims[-1],), alike=_find_alike(tuple(zip(*dims, strict=False))))


def _join(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    return OutputNames((merge_names(*dims),), alike=_find_alike(tuple(zip(*dims, strict=True))))


def _update(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    """Name an array into which a part is written by the names of both."""
    array, part = dims[:2]
    return OutputNames((merge_names(array, part) if len(array) == len(part) else array,))


def _reshape(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    """Name the first dim of each group of merged or split dims by the first name of the group.

    Numbered channels are followed as parts of an array are: if they are the first.
    """
    (given, *_), (shape,), names = _shapes(equation.invars), _shapes(equation.outvars), dims[0]
    found: list[str | None] = [None] * len(shape)
    for inside, results in find_reshaped(given, shape):
        of_group = tuple(names[k] for k in inside)
        if of_group == SLOTS and len(results) == 1:
            found[results[0]] = EXPERT_SLOTS
        elif of_group == (EXPERT_SLOTS,) and len(results) == 2:
            found[results[0]], found[results[1]] = SLOTS
        else:
            name = next(filter(None, of_group), None)
            found[results[0]] = of_group[0] if name and ":" in name else name
    return OutputNames((tuple(found),))


def _name_ragged(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    """Name the product of sorted rows with the kernel of their group; for its gradient, with other rows."""
    left, right = dims[:2]
    if len(right) == 3:
        # the rows' features are the kernel's second dim; or its third, for the gradient of the rows
        ((_, (contracted,)), _) = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        summed, groups = filter(None, left[1:2]), filter(None, right[:1])
        return OutputNames(((left[0], right[3 - contracted]),), tuple(summed), grouped=tuple(groups))
    of_groups = dims[2][0]
    summed, groups = (tuple(filter(None, (each,))) for each in (left[0], of_groups))
    return OutputNames(((of_groups, left[1], right[1]),), summed, grouped=groups)


def _scatter(equation: Any, dims: Sequence[Dims]) -> OutputNames:
    array, _, updates = dims
    numbers = equation.params["dimension_numbers"]
    kept = [i for i in range(len(array)) if i not in numbers.inserted_window_dims]
    found = list(array)
    for at, window in zip(kept, numbers.update_window_dims, strict=False):
        found[at] = found[at] or updates[window]
    others = [name for i, name in enumerate(updates) if i not in numbers.update_window_dims and name]
    return OutputNames((tuple(found),), tuple(others))


RULES: Mapping[str, Callable[[Any, Sequence[Dims]], OutputNames]] = {
    **dict.fromkeys(
        (
            *("cumsum", "dynamic_slice", "pad", "reduce_window", "reduce_window_max", "reduce_window_min"),
            *("reduce_window_sum", "rev", "slice", "sort", "select_and_gather_add", "split"),
        ),
        _name_like_first,
    ),
    "concatenate": _join,
    "dynamic_update_slice": _update,
    "ragged_dot_general": _name_ragged,
    "reshape": _reshape,
    "scatter-add": _scatter,
    "scatter": _scatter,
    "select_and_scatter_add": _name_like_last,
}
"""Operation -> its rule; `_follow` is the rule of any other operation."""
