"""Layout and sizes -> PartitionSpecs of a pytree, and the table that people read.

Works on plain numbers: no device is touched, so a mesh that is not here can be inspected.
Next: `train_step/state.py` (the whole train state).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.sharding.array_dims import Named
from shardtrain.sharding.resolve import Spec, resolve
from shardtrain.sharding.rules import Rules


def partition_spec(spec: Spec) -> PartitionSpec:
    """A jax PartitionSpec from the axes of each dim.

    >>> partition_spec((("fsdp",), (), ("data", "tensor"))) == PartitionSpec("fsdp", None, ("data", "tensor"))
    True
    """
    return PartitionSpec(*((d[0] if len(d) == 1 else d) if d else None for d in spec))


def partition_specs(
    arrays: Mapping[str, Named], like: Any, rules: Rules, sizes: Mapping[str, int], unnamed: str
) -> Any:
    """The PartitionSpecs of a pytree.

    Args:
      arrays: path -> dims and shape, in the order of the leaves of `like`.
      like: the pytree whose structure the result takes.
      rules: dim -> axes.
      sizes: axis -> size.
      unnamed: as in `Layout`.

    Returns:
      A pytree of PartitionSpec like `like`.

    Raises:
      ValueError: everything that does not fit, see `resolve.resolve`.
    """
    specs = resolve(arrays, rules, sizes, unnamed=unnamed)
    return jax.tree.unflatten(jax.tree.structure(like), [partition_spec(specs[path]) for path in arrays])


def with_leading_dim(specs: Any, over: str | tuple[str, ...]) -> Any:
    """The PartitionSpecs of arrays that got one more dim in front, sharded over these axes.

    >>> with_leading_dim({"up": PartitionSpec("fsdp")}, "data")["up"] == PartitionSpec("data", "fsdp")
    True
    """
    return jax.tree.map(
        lambda spec: PartitionSpec(over, *spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def without_pipeline(
    spec: PartitionSpec, dim: int, shape: Sequence[int], sizes: Mapping[str, int]
) -> PartitionSpec:
    """A spec with the axis pipeline on another dim, the first that it divides, or on none.

    Args:
      spec: of an array.
      dim: which is to be whole on every stage.
      shape: of the array.
      sizes: axis -> size.

    >>> tuple(without_pipeline(PartitionSpec("pipeline", "fsdp"), 0, (7, 8), {"pipeline": 2, "fsdp": 2}))
    (None, ('fsdp', 'pipeline'))
    """
    entries: list[tuple[str, ...]] = [((e,) if isinstance(e, str) else tuple(e or ())) for e in spec]
    entries += [()] * (len(shape) - len(entries))
    entries[dim] = tuple(axis for axis in entries[dim] if axis != axes.PIPELINE)
    for i, entry in enumerate(entries):
        shards = math.prod(sizes[axis] for axis in (*entry, axes.PIPELINE))
        if i != dim and shape[i] % shards == 0:
            entries[i] = (*entry, axes.PIPELINE)
            break
    return PartitionSpec(*(entry or None for entry in entries))


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Every axis that a PartitionSpec names, in its order."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return tuple(axis for entry in entries for axis in entry)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one array lies on the mesh: a line of the table.

    Args:
      path: where it stands in the state.
      shape: its global shape in elements.
      dtype: its dtype's name.
      dims: its dim names, None where it has none.
      spec: its PartitionSpec.
      num_bytes: all of it.
      device_bytes: what one device holds of it.
      copies: how many devices hold each byte of it; 1 is fully sharded.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str | None, ...] | None
    spec: PartitionSpec
    num_bytes: int
    device_bytes: int
    copies: int


def sharding_rows(
    arrays: Mapping[str, Named], like: Any, specs: Any, sizes: Mapping[str, int]
) -> tuple[Row, ...]:
    """The table's lines for a pytree of arrays (or shapes) and its specs, in the pytree's order."""
    leaves = jax.tree.leaves(like)
    spec_leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return tuple(
        _row(path, named, leaf, spec, sizes)
        for (path, named), leaf, spec in zip(arrays.items(), leaves, spec_leaves, strict=True)
    )


def _row(path: str, named: Named, leaf: Any, spec: PartitionSpec, sizes: Mapping[str, int]) -> Row:
    num_bytes = math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
    shards = math.prod(sizes[axis] for axis in spec_axes(spec))
    return Row(
        path=path,
        shape=tuple(leaf.shape),
        dtype=jnp.dtype(leaf.dtype).name,
        dims=named.dims,
        spec=spec,
        num_bytes=num_bytes,
        device_bytes=num_bytes // shards,
        copies=math.prod(sizes.values()) // shards,
    )


def spec_text(spec: PartitionSpec, sizes: Mapping[str, int]) -> str:
    """A spec as the table shows it, without axes of size 1: `- x fsdp x tensor`, or `whole`."""
    entries = [((e,) if isinstance(e, str) else e or ()) for e in spec]
    words = ["+".join(axis for axis in entry if sizes[axis] > 1) for entry in entries]
    return " x ".join(word or "-" for word in words) if any(words) else "whole"


def totals(rows: Sequence[Row]) -> tuple[int, int, int]:
    """(bytes of all arrays, bytes that one device holds, bytes of arrays whole on every device)."""
    whole = sum(row.num_bytes for row in rows if row.device_bytes == row.num_bytes)
    return sum(row.num_bytes for row in rows), sum(row.device_bytes for row in rows), whole
