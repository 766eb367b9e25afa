"""The dim names and shapes of a model's arrays, also as patterns of paths give them. No jax.

Next: `resolve.py`, which joins them with the rules of a layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardtrain.errors.messages import problems_error
from shardtrain.sharding.rules import Rules
from shardtrain.system.untrusted_files import some

Dims = tuple[str | None, ...] | None
"""The names of an array's dims; None for a dim that is not sharded, or for an array without names."""


JOINT = "+"
"""Between the names of a dim that has several, as in PartitionSpec(("data", "fsdp")): `data+fsdp`."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """The dims and shape of one array: what `resolve` needs to know of it.

    Args:
      dims: a name for each dim; None for a dim that is not sharded, as dims without an entry at the end
        are not. None instead of all names where the array has none.
      shape: sizes in elements.
    """

    dims: Dims
    shape: tuple[int, ...]


def is_dims(leaf: object) -> bool:
    """Whether a leaf of a tree of dims has been reached, for `is_leaf`: the names of an array, or None."""
    return leaf is None or isinstance(leaf, tuple)


def unruled_names(arrays: Mapping[str, Named], rules: Rules) -> list[str]:
    """The names of dims that have no rule, each once, in order."""
    names = (dim for named in arrays.values() for dim in named.dims or () if dim is not None)
    return list(dict.fromkeys(dim for dim in names if dim not in rules))


def unnamed_paths(arrays: Mapping[str, Named]) -> list[str]:
    """The arrays whose dims have no names at all."""
    return [path for path, named in arrays.items() if named.dims is None and named.shape]


def dims_by_pattern(
    shapes: Mapping[str, Sequence[int]], names: Mapping[str, Sequence[str | None]]
) -> dict[str, tuple[str | None, ...]]:
    """The dims that patterns of paths give to parameters, as `Run.names` asks.

    Args:
      shapes: path -> shape of every parameter.
      names: pattern (fnmatch, on the whole path) -> a name for each dim. Of several that match, the first
        decides, so the special stands before the general.

    Returns:
      path -> names, of those that a pattern matches.

    Raises:
      ValueError: lists every pattern that decides nothing, and every number of names that is not that of
        the dims.

    >>> dims_by_pattern({"up/kernel": (4, 8), "up/bias": (8,)}, {"*/kernel": ("embed", "mlp")})
    {'up/kernel': ('embed', 'mlp')}
    """
    found: dict[str, str] = {}
    for path in shapes:
        first = next((pattern for pattern in names if fnmatchcase(path, pattern)), None)
        if first is not None:
            found[path] = first
    problems = [_idle_text(pattern, shapes, found) for pattern in names if pattern not in found.values()]
    for pattern, dims in names.items():
        named = [path for path, by in found.items() if by == pattern]
        wrong = [f"{path} {tuple(shapes[path])}" for path in named if len(shapes[path]) != len(dims)]
        if wrong:
            problems.append(
                f"{pattern!r} gives {len(dims)} names, {tuple(dims)}, but matches {some(wrong, 8)};"
                " give each number of dims a pattern of its own"
            )
    if problems:
        raise problems_error("the names of this run do not fit the model's parameters", problems)
    return {path: tuple(names[pattern]) for path, pattern in found.items()}


def _idle_text(pattern: str, shapes: Mapping[str, Sequence[int]], found: Mapping[str, str]) -> str:
    """Why a pattern names nothing."""
    taken = [path for path in shapes if fnmatchcase(path, pattern)]
    if taken:
        return f"{pattern!r} matches only what {found[taken[0]]!r} before it has named; put it first"
    return f"{pattern!r} matches no parameter; there are {some(list(shapes), 20)}"
