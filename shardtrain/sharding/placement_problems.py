"""Find why a layout cannot shard some arrays, and rules or names that would fix it. No jax."""

import math
from collections.abc import Iterable, Mapping, Sequence

from shardtrain import axes
from shardtrain.errors.messages import near
from shardtrain.sharding.array_dims import NamedArray, list_unnamed_paths, list_unruled_names
from shardtrain.sharding.rules import Rules, find_repeated


def find_array_problems(
    path: str, named: NamedArray, rules: Rules, sizes: Mapping[str, int], unnamed: str = "refuse"
) -> list[str]:
    """List why one array cannot be sharded by the rules, one sentence each."""
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
    for axis, _ in find_repeated(axis for axis, _ in used):
        dims = [dim for a, dim in used if a == axis]
        problems.append(
            f"{path}: axis {axis!r} shards {' and '.join(map(repr, dims))} of one array;"
            f" give one of them another rule, as {dims[-1]} = []"
        )
    for dim, size in known:
        total = math.prod(sizes.get(axis, 1) for axis in rules[dim])
        if size % total:
            problems.append(format_indivisible(path, dim, size, rules[dim], total))
    return problems


def format_indivisible(path: str, dim: str, size: int, dim_axes: Sequence[str], total: int) -> str:
    """Format the error for a dim whose size is not divisible by its axes.

    >>> print(format_indivisible("q", "heads", 6, ["tensor"], 4).partition("Use ")[2])
    a total of 2, a size of 4 or 8, or the rule heads = []
    """
    down, up = size - size % total, size - size % total + total
    options = f"a size of {down} or {up}" if down else f"a size of {up}"
    return (
        f"{path}: dim {dim!r} of size {size} cannot be split over axes {list(dim_axes)}"
        f" of total size {total}: {size} % {total} = {size % total}."
        f" Use a total of {math.gcd(size, total)}, {options}, or the rule {dim} = []"
    )


def format_naming(
    arrays: Mapping[str, NamedArray], rules: Rules, sizes: Mapping[str, int], unnamed: str = "refuse"
) -> str:
    """Format fixes for missing names and rules, ready to paste; empty if none are missing."""
    paths = list_unnamed_paths(arrays) if unnamed == "refuse" else []
    fitting = find_fitting_rules(arrays, rules, sizes)
    ways = []
    if fitting:
        ways.append(f"rules for them, as {format_rules('parameters', fitting)}")
    if paths:
        largest = max(paths, key=lambda path: math.prod(arrays[path].shape))
        dims = find_fitting_dims(arrays[largest].shape, sizes)
        ways.append(f"names from outside, as Run(names={{{largest!r}: {dims!r}}}), or any pattern of paths")
        ways.append('names in the model: out_sharding=("embed", "mlp") in nnx, nn.with_partitioning in linen')
        if sizes.get(axes.FSDP, 1) > 1:
            ways.append(SHARD)
    return format_ways(ways) if ways else ""


REPLICATE = 'replicate them: --unnamed replicate, in Python Layout(unnamed="replicate")'
SHARD = "shard those without names over fsdp along their largest dim: --unnamed shard"


def format_ways(ways: Iterable[str]) -> str:
    """Format the fixes for missing names and rules, one per line."""
    return "\n  one of these helps:" + "".join(f"\n    {way}" for way in (*ways, REPLICATE))


def format_rules(table: str, rules: Rules) -> str:
    """Format rules as Python code.

    >>> format_rules("parameters", {"kv": ("tensor",), "odd": ()})
    "Strategy(layout=Layout(parameters={'kv': ['tensor'], 'odd': []}))"
    """
    return f"Strategy(layout=Layout({table}={ {dim: list(a) for dim, a in rules.items()} }))"


def find_fitting_rules(arrays: Mapping[str, NamedArray], rules: Rules, sizes: Mapping[str, int]) -> Rules:
    """Return a rule for each name that has none: tensor or fsdp if all its arrays allow it, else replicated.

    >>> arrays = {"q": NamedArray(dims=("embed", "kv", "odd"), shape=(8, 4, 3))}
    >>> find_fitting_rules(arrays, {"embed": ("fsdp",)}, {"fsdp": 2, "tensor": 2})
    {'kv': ('tensor',), 'odd': ()}
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in list_unruled_names(arrays, rules):
        having = [named for named in arrays.values() if name in (named.dims or ())]
        candidates = [(axis,) for axis in (axes.TENSOR, axes.FSDP) if sizes.get(axis, 1) > 1]

        def fits(rule: tuple[str, ...], name: str = name, having: list[NamedArray] = having) -> bool:
            trial = {**rules, **found, name: rule}
            return not any(_find_problems(named, trial, sizes) for named in having)

        found[name] = next((rule for rule in candidates if fits(rule)), ())
    return found


def _find_problems(named: NamedArray, rules: Rules, sizes: Mapping[str, int]) -> list[str]:
    known = tuple(dim if dim in rules else None for dim in named.dims or ())
    return find_array_problems("", NamedArray(dims=known, shape=named.shape), rules, sizes)


def find_fitting_dims(shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[str | None, ...]:
    """Return mesh axes as names for the dims of an array: tensor for the largest dim, fsdp for the next.

    >>> find_fitting_dims((3, 64, 256), {"fsdp": 2, "tensor": 4})
    (None, 'fsdp', 'tensor')
    """
    dims: list[str | None] = [None] * len(shape)
    order = sorted(range(len(shape)), key=lambda i: -shape[i])
    for axis in (axes.TENSOR, axes.FSDP):
        free = (i for i in order if dims[i] is None and shape[i] % sizes.get(axis, 1) == 0)
        if sizes.get(axis, 1) > 1 and (i := next(free, None)) is not None:
            dims[i] = axis
    return tuple(dims)
