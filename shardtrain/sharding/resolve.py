"""Join a layout with the names that a model gives its dims: the axes of every dim. No jax.

Several devices need a name for every dim, and a rule for every name: what is missing is refused, with
rules that would do, or replicated where the layout says so. One device needs neither.
Next: `specs.py` (shardings of a pytree).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from shardtrain import axes
from shardtrain.errors.messages import near, problems_error
from shardtrain.sharding.layout import Layout, Rules, repeated

Spec = tuple[tuple[str, ...], ...]
"""For each dim of an array, the axes that shard it (empty: not sharded)."""

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


def is_one_device(sizes: Mapping[str, int]) -> bool:
    """Whether no axis is larger than 1, so that nothing needs a name."""
    return all(size == 1 for size in sizes.values())


def completed(layout: Layout, arrays: Mapping[str, Named], sizes: Mapping[str, int]) -> Layout:
    """The layout with a rule for each name of these arrays that stands for itself or is to be replicated.

    The name of a mesh axis stands for that axis, and joint names for the axes of both. Where arrays
    without names are replicated, or there is one device, any other name without a rule is replicated too.

    >>> arrays = {"up": Named(dims=("fsdp", "features"), shape=(64, 256))}
    >>> completed(Layout(unnamed="replicate"), arrays, {"fsdp": 2}).parameters
    {'fsdp': ('fsdp',), 'features': ()}
    """
    unnamed = "replicate" if is_one_device(sizes) else layout.unnamed
    rules, added = layout.sharded_rules, {}
    for name in unruled_names(arrays, rules):
        words = name.split(JOINT)
        if all(word in rules or word in axes.AXES for word in words):
            added[name] = tuple(axis for word in words for axis in rules.get(word, (word,)))
        elif unnamed == "replicate":
            added[name] = ()
    return replace(layout, parameters={**layout.parameters, **added}, unnamed=unnamed)


def unruled_names(arrays: Mapping[str, Named], rules: Rules) -> list[str]:
    """The names of dims that have no rule, each once, in order."""
    names = (dim for named in arrays.values() for dim in named.dims or () if dim is not None)
    return list(dict.fromkeys(dim for dim in names if dim not in rules))


def unnamed_paths(arrays: Mapping[str, Named]) -> list[str]:
    """The arrays whose dims have no names at all."""
    return [path for path, named in arrays.items() if named.dims is None and named.shape]


def unplaced_text(layout: Layout, arrays: Mapping[str, Named], sizes: Mapping[str, int]) -> str | None:
    """What is whole on every device for want of a name or a rule, as a line to read; None if nothing is."""
    paths = unnamed_paths(arrays)
    names = [
        name
        for name in unruled_names(arrays, layout.sharded_rules)
        if not all(word in layout.sharded_rules or word in axes.AXES for word in name.split(JOINT))
    ]
    found = [f"no names for the dims of {_listed(paths)}"] if paths else []
    found += [f"no rule for the dims {', '.join(map(repr, names))}"] if names else []
    if not found:
        return None
    use = "on several devices they need them, or --unnamed replicate"
    return f"{'; '.join(found)}: {use if is_one_device(sizes) else 'whole on every device'}"


def _listed(paths: Sequence[str], most: int = 3) -> str:
    """Some paths, and how many more.

    >>> _listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(paths) - most
    return ", ".join(paths[:most]) + (f" and {more} more" if more > 0 else "")


def resolve(
    arrays: Mapping[str, Named], rules: Rules, sizes: Mapping[str, int], *, unnamed: str = "refuse"
) -> dict[str, Spec]:
    """Join dims and rules: the axes of every dim of every array.

    Args:
      arrays: path -> dims and shape.
      rules: dim -> axes, see `completed`.
      sizes: axis -> size.
      unnamed: "refuse" arrays without names, or "replicate" them.

    Returns:
      path -> for each dim, the axes that shard it. On one device, where nothing can be sharded, an array
      that does not fit is whole.

    Raises:
      ValueError: on several devices; lists every unknown dim, every axis used twice in an array, every size
        that does not divide and every array without names, each with the change to make.

    >>> arrays = {"up": Named(dims=("embed", "mlp"), shape=(64, 256))}
    >>> resolve(arrays, {"embed": ("fsdp",), "mlp": ("tensor",)}, {"fsdp": 2, "tensor": 4})
    {'up': (('fsdp',), ('tensor',))}
    """
    specs, problems = {}, []
    for path, named in arrays.items():
        found = array_problems(path, named, rules, sizes, unnamed)
        if named.dims is None or found:
            specs[path] = ((),) * len(named.shape)
        else:
            specs[path] = _spec(named, rules)
        problems += found
    if problems and not is_one_device(sizes):
        counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        error = str(problems_error(f"the layout does not fit the model ({counted})", problems))
        raise ValueError(error + naming_text(arrays, rules, sizes, unnamed))
    return specs


def _spec(named: Named, rules: Rules) -> Spec:
    dims = named.dims or ()
    missing = len(named.shape) - len(dims)
    return (*(() if dim is None else tuple(rules[dim]) for dim in dims), *((),) * missing)


def array_problems(
    path: str, named: Named, rules: Rules, sizes: Mapping[str, int], unnamed: str = "refuse"
) -> list[str]:
    """What keeps this array from being placed, one sentence each."""
    if named.dims is None:
        is_refused = unnamed == "refuse" and named.shape
        return [f"{path} has shape {named.shape} but its dims have no names"] if is_refused else []
    if len(named.dims) > len(named.shape):
        return [
            f"{path} has shape {named.shape} but the names {named.dims}; give it {len(named.shape)} names"
        ]
    pairs = [(dim, size) for dim, size in zip(named.dims, named.shape, strict=False) if dim is not None]
    problems = [f"{path}: no rule for dim {near(dim, rules)}" for dim, _ in pairs if dim not in rules]
    known = [(dim, size) for dim, size in pairs if dim in rules]
    used = [(axis, dim) for dim, _ in known for axis in rules[dim]]
    for axis, _ in repeated(axis for axis, _ in used):
        dims = [dim for a, dim in used if a == axis]
        problems.append(
            f"{path}: axis {axis!r} shards {' and '.join(map(repr, dims))} of one array;"
            f" give one of them another rule, as {dims[-1]} = []"
        )
    for dim, size in known:
        total = math.prod(sizes.get(axis, 1) for axis in rules[dim])
        if size % total:
            problems.append(indivisible_text(path, dim, size, rules[dim], total))
    return problems


def indivisible_text(path: str, dim: str, size: int, dim_axes: Sequence[str], total: int) -> str:
    """The error for a dim whose size its axes do not divide.

    >>> print(indivisible_text("q", "heads", 6, ["tensor"], 4).partition("Use ")[2])
    a total of 2, a size of 4 or 8, or the rule heads = []
    """
    down, up = size - size % total, size - size % total + total
    options = f"a size of {down} or {up}" if down else f"a size of {up}"
    return (
        f"{path}: dim {dim!r} of size {size} cannot be split over axes {list(dim_axes)}"
        f" of total size {total}: {size} % {total} = {size % total}."
        f" Use a total of {math.gcd(size, total)}, {options}, or the rule {dim} = []"
    )


def naming_text(
    arrays: Mapping[str, Named], rules: Rules, sizes: Mapping[str, int], unnamed: str = "refuse"
) -> str:
    """The ways out where names or rules are missing, ready to paste; empty where none are."""
    paths = unnamed_paths(arrays) if unnamed == "refuse" else []
    fitting = fitting_rules(arrays, rules, sizes)
    ways = []
    if fitting:
        ways.append(f"rules for them, as {rules_text('parameters', fitting)}")
    if paths:
        largest = max(paths, key=lambda path: math.prod(arrays[path].shape))
        dims = fitting_dims(arrays[largest].shape, sizes)
        ways.append(f"names from outside, as Run(names={{{largest!r}: {dims!r}}}), or any pattern of paths")
        ways.append('names in the model: out_sharding=("embed", "mlp") in nnx, nn.with_partitioning in linen')
    return ways_text(ways) if ways else ""


REPLICATE = 'whole on every device: --unnamed replicate, in Python Layout(unnamed="replicate")'


def ways_text(ways: Iterable[str]) -> str:
    """The ways out of missing names and rules, a line each."""
    return "\n  one of these helps:" + "".join(f"\n    {way}" for way in (*ways, REPLICATE))


def rules_text(table: str, rules: Rules) -> str:
    """A rule table as Python.

    >>> rules_text("parameters", {"kv": ("tensor",), "odd": ()})
    "Strategy(layout=Layout(parameters={'kv': ['tensor'], 'odd': []}))"
    """
    return f"Strategy(layout=Layout({table}={ {dim: list(a) for dim, a in rules.items()} }))"


def fitting_rules(arrays: Mapping[str, Named], rules: Rules, sizes: Mapping[str, int]) -> Rules:
    """A rule for each name that has none: tensor or fsdp where all arrays allow it, else whole.

    >>> arrays = {"q": Named(dims=("embed", "kv", "odd"), shape=(8, 4, 3))}
    >>> fitting_rules(arrays, {"embed": ("fsdp",)}, {"fsdp": 2, "tensor": 2})
    {'kv': ('tensor',), 'odd': ()}
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in unruled_names(arrays, rules):
        having = [named for named in arrays.values() if name in (named.dims or ())]
        candidates = [(axis,) for axis in (axes.TENSOR, axes.FSDP) if sizes.get(axis, 1) > 1]

        def fits(rule: tuple[str, ...], name: str = name, having: list[Named] = having) -> bool:
            trial = {**rules, **found, name: rule}
            return not any(_unplaceable(named, trial, sizes) for named in having)

        found[name] = next((rule for rule in candidates if fits(rule)), ())
    return found


def _unplaceable(named: Named, rules: Rules, sizes: Mapping[str, int]) -> list[str]:
    """Problems of an array but for the names that have no rule yet."""
    known = tuple(dim if dim in rules else None for dim in named.dims or ())
    return array_problems("", Named(dims=known, shape=named.shape), rules, sizes)


def fitting_dims(shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[str | None, ...]:
    """Names of mesh axes for the dims of an array: tensor for the largest dim, fsdp for the next.

    >>> fitting_dims((3, 64, 256), {"fsdp": 2, "tensor": 4})
    (None, 'fsdp', 'tensor')
    """
    dims: list[str | None] = [None] * len(shape)
    order = sorted(range(len(shape)), key=lambda i: -shape[i])
    for axis in (axes.TENSOR, axes.FSDP):
        free = (i for i in order if dims[i] is None and shape[i] % sizes.get(axis, 1) == 0)
        if sizes.get(axis, 1) > 1 and (i := next(free, None)) is not None:
            dims[i] = axis
    return tuple(dims)


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
                f"{pattern!r} gives {len(dims)} names, {tuple(dims)}, but matches {_listed(wrong, 8)};"
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
    return f"{pattern!r} matches no parameter; there are {_listed(list(shapes), 20)}"
