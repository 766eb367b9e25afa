"""The dim names and shapes of a model's arrays, also from patterns of paths. No jax.

Next: `resolve.py`, which joins them with the rules of a layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardtrain.errors.messages import refuse
from shardtrain.sharding.rules import Rules
from shardtrain.system.excerpts import some

Dims = tuple[str | None, ...] | None
"""The names of an array's dims; None for a dim that is not sharded, or for an array without names."""


JOINT = "+"
"""Joins the names of a dim that has several, as in PartitionSpec(("data", "fsdp")): `data+fsdp`."""


@dataclass(frozen=True, kw_only=True)
class NamedArray:
    """The dim names and shape of one array.

    Args:
      dims: a name for each dim, None for a dim that is not sharded; trailing dims that are not sharded may be
        left out. None if the array has no dim names.
      shape: sizes in elements.
    """

    dims: Dims
    shape: tuple[int, ...]


def is_dims(leaf: object) -> bool:
    """Return whether this is a leaf of a tree of dim names (a tuple or None), for `is_leaf` of jax.tree."""
    return leaf is None or isinstance(leaf, tuple)


def list_unruled_names(arrays: Mapping[str, NamedArray], rules: Rules) -> list[str]:
    """Return the dim names that have no rule, each once, in order."""
    names = (dim for named in arrays.values() for dim in named.dims or () if dim is not None)
    return list(dict.fromkeys(dim for dim in names if dim not in rules))


def list_unnamed_paths(arrays: Mapping[str, NamedArray]) -> list[str]:
    """Return the paths of the arrays without any dim names; scalars need none."""
    return [path for path, named in arrays.items() if named.dims is None and named.shape]


def dims_by_pattern(
    shapes: Mapping[str, Sequence[int]], names: Mapping[str, Sequence[str | None]]
) -> dict[str, tuple[str | None, ...]]:
    """Assign dim names to parameters by patterns of their paths, see `Run.names`.

    Args:
      shapes: path -> shape of every parameter.
      names: pattern (fnmatch, on the whole path) -> a name for each dim. The first pattern that matches a
        path applies, so put special patterns before general ones.

    Returns:
      path -> dim names, for the paths that a pattern matches.

    Raises:
      ValueError: lists every pattern that is never used, and every pattern whose number of names differs from
        the number of dims of its arrays.

    >>> dims_by_pattern({"up/kernel": (4, 8), "up/bias": (8,)}, {"*/kernel": ("embed", "mlp")})
    {'up/kernel': ('embed', 'mlp')}
    """
    found: dict[str, str] = {}
    for path in shapes:
        first = next((pattern for pattern in names if fnmatchcase(path, pattern)), None)
        if first is not None:
            found[path] = first
    problems = [_format_idle(pattern, shapes, found) for pattern in names if pattern not in found.values()]
    for pattern, dims in names.items():
        named = [path for path, by in found.items() if by == pattern]
        wrong = [f"{path} {tuple(shapes[path])}" for path in named if len(shapes[path]) != len(dims)]
        if wrong:
            problems.append(
                f"{pattern!r} gives {len(dims)} names, {tuple(dims)}, but matches {some(wrong, 8)};"
                " give each number of dims a pattern of its own"
            )
    refuse("the names of this run do not fit the model's parameters", problems)
    return {path: tuple(names[pattern]) for path, pattern in found.items()}


def _format_idle(pattern: str, shapes: Mapping[str, Sequence[int]], found: Mapping[str, str]) -> str:
    taken = [path for path in shapes if fnmatchcase(path, pattern)]
    if taken:
        return f"{pattern!r} matches only what {found[taken[0]]!r} before it has named; put it first"
    return f"{pattern!r} matches no parameter; there are {some(list(shapes), 20)}"
