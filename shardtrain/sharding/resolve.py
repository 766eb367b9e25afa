"""Find the axes that shard each dim of a model's arrays, from its dim names and a layout. No jax.

On several devices every dim needs a name and every name a rule; arrays without them are refused with rules
that would fit, or replicated if the layout says so. One device needs neither. Next: `specs.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardtrain import axes
from shardtrain.errors.messages import near, problems_error
from shardtrain.sharding.array_dims import JOINT, NamedArray, list_unnamed_paths, list_unruled_names
from shardtrain.sharding.axis_sizes import is_one_device
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.placement_problems import find_array_problems, format_naming
from shardtrain.sharding.rules import Rules
from shardtrain.sharding.single_arrays import Shards, find_axes, find_shard_problems
from shardtrain.system.excerpts import some

Spec = tuple[tuple[str, ...], ...]
"""For each dim of an array, the axes that shard it; () if it is not sharded."""


def complete_layout(layout: Layout, arrays: Mapping[str, NamedArray], sizes: Mapping[str, int]) -> Layout:
    """Return the layout with rules added for mesh axes used as names, joined names, and unknown names.

    The name of a mesh axis is sharded over that axis, joined names (`data+fsdp`) over the axes of each. With
    unnamed "replicate" or "shard", or on one device, all other names without a rule are replicated.

    >>> arrays = {"up": NamedArray(dims=("fsdp", "features"), shape=(64, 256))}
    >>> complete_layout(Layout(unnamed="replicate"), arrays, {"fsdp": 2}).parameters
    {'fsdp': ('fsdp',), 'features': ()}
    """
    unnamed = "replicate" if is_one_device(sizes) else layout.unnamed
    rules, added = layout.sharded_rules, {}
    for name in list_unruled_names(arrays, rules):
        words = name.split(JOINT)
        if all(word in rules or word in axes.AXES for word in words):
            added[name] = tuple(axis for word in words for axis in rules.get(word, (word,)))
        elif unnamed != "refuse":
            added[name] = ()
    return replace(layout, parameters={**layout.parameters, **added}, unnamed=unnamed)


def format_unplaced(layout: Layout, arrays: Mapping[str, NamedArray], sizes: Mapping[str, int]) -> str | None:
    """Format a line about arrays replicated for lack of names or rules; None if there are none."""
    paths = list_unnamed_paths(arrays)
    names = [
        name
        for name in list_unruled_names(arrays, layout.sharded_rules)
        if not all(word in layout.sharded_rules or word in axes.AXES for word in name.split(JOINT))
    ]
    found = [f"no names for the dims of {some(paths, 3)}"] if paths else []
    found += [f"no rule for the dims {', '.join(map(repr, names))}"] if names else []
    if not found:
        return None
    use = "on several devices they need them, or --unnamed replicate"
    if layout.unnamed == "shard" and paths:
        placed = "sharded over fsdp along the largest dim that it divides, and XLA shards the activations"
    else:
        placed = "replicated on every device"
    return f"{'; '.join(found)}: {use if is_one_device(sizes) else placed}"


def resolve(
    arrays: Mapping[str, NamedArray],
    rules: Rules,
    sizes: Mapping[str, int],
    *,
    unnamed: str = "refuse",
    own: Mapping[str, Shards] | None = None,
) -> dict[str, Spec]:
    """Return the axes that shard each dim of each array.

    Args:
      arrays: path -> dims and shape.
      rules: dim -> axes, see `complete_layout`.
      sizes: axis -> size.
      own: path -> axis -> the number of the dim that it splits, for arrays that do not follow rules.
      unnamed: what happens to arrays without names: "refuse", "replicate", or "shard" them along their
        largest dim over fsdp, if the rules use that axis.

    Returns:
      path -> the axes that shard each dim. On one device, where nothing is sharded, arrays that do not fit
      the rules are accepted.

    Raises:
      ValueError: on several devices, lists every dim without a rule, axis used twice in one array,
        indivisible size and array without names, each with the change to make.

    >>> arrays = {"up": NamedArray(dims=("embed", "mlp"), shape=(64, 256))}
    >>> resolve(arrays, {"embed": ("fsdp",), "mlp": ("tensor",)}, {"fsdp": 2, "tensor": 4})
    {'up': (('fsdp',), ('tensor',))}
    """
    own = own or {}
    specs, problems = {}, [f"no parameter {near(path, arrays)}" for path in own if path not in arrays]
    for path, named in arrays.items():
        if path in own:
            dims = {str(number): size for number, size in enumerate(named.shape)}
            problems += find_shard_problems(path, dims, own[path], sizes)
            specs[path] = tuple(find_axes(dim, own[path]) for dim in dims)
            continue
        found = find_array_problems(path, named, rules, sizes, unnamed)
        if named.dims is None and not found and unnamed == "shard":
            specs[path] = shard_largest_dim(named.shape, rules, sizes)
        elif named.dims is None or found:
            specs[path] = ((),) * len(named.shape)
        else:
            specs[path] = _make_spec(named, rules)
        problems += found
    if problems and not is_one_device(sizes):
        counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        error = str(problems_error(f"the layout does not fit the model ({counted})", problems))
        raise ValueError(error + format_naming(arrays, rules, sizes, unnamed))
    return specs


def shard_largest_dim(shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]) -> Spec:
    """Return the axes of an array without names: fsdp for the first of its largest dims that fsdp divides.

    Nothing is sharded if no rule has fsdp, as for parameters at ZeRO 1 and 2.

    >>> shard_largest_dim((3, 64, 64), {"embed": ("fsdp",)}, {"fsdp": 8})
    ((), ('fsdp',), ())
    >>> shard_largest_dim((3, 5), {"embed": ("fsdp",)}, {"fsdp": 8})
    ((), ())
    """
    used = any(axes.FSDP in dim_axes for dim_axes in rules.values())
    fitting = [i for i, size in enumerate(shape) if used and size and size % sizes.get(axes.FSDP, 1) == 0]
    largest = max(fitting, key=lambda i: shape[i], default=None)
    return tuple((axes.FSDP,) if i == largest else () for i in range(len(shape)))


def _make_spec(named: NamedArray, rules: Rules) -> Spec:
    dims = named.dims or ()
    missing = len(named.shape) - len(dims)
    return (*(() if dim is None else tuple(rules[dim]) for dim in dims), *((),) * missing)
