"""Make the PartitionSpecs of a pytree from rules and axis sizes, and the rows of the sharding table.

No device is used, so that any mesh can be inspected. Next: `train_step/placement.py` (the whole train state).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.resolve import Spec, resolve
from shardtrain.sharding.rules import Rules
from shardtrain.sharding.single_arrays import Shards


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return the jax PartitionSpec for the axes of each dim.

    >>> partition_spec((("fsdp",), (), ("data", "tensor"))) == PartitionSpec("fsdp", None, ("data", "tensor"))
    True
    """
    return PartitionSpec(*((d[0] if len(d) == 1 else d) if d else None for d in spec))


def partition_specs(
    arrays: Mapping[str, NamedArray],
    like: Any,
    rules: Rules,
    sizes: Mapping[str, int],
    unnamed: str,
    own: Mapping[str, Shards] | None = None,
) -> Any:
    """Return the PartitionSpecs of a pytree.

    Args:
      arrays: path -> dims and shape, in the order of the leaves of `like`.
      like: the pytree whose structure the result takes.
      rules: dim -> axes.
      sizes: axis -> size.
      unnamed: as in `Layout`.
      own: see `resolve.resolve`.

    Returns:
      A pytree of PartitionSpec like `like`.

    Raises:
      ValueError: lists all problems, see `resolve.resolve`.
    """
    specs = resolve(arrays, rules, sizes, unnamed=unnamed, own=own)
    return jax.tree.unflatten(jax.tree.structure(like), [partition_spec(specs[path]) for path in arrays])


def add_leading_dim(specs: Any, over: str | tuple[str, ...]) -> Any:
    """Return the PartitionSpecs with one more dim in front, sharded over these axes.

    >>> add_leading_dim({"up": PartitionSpec("fsdp")}, "data")["up"] == PartitionSpec("data", "fsdp")
    True
    """
    return jax.tree.map(lambda spec: PartitionSpec(over, *spec), specs)


def move_pipeline(
    spec: PartitionSpec, dim: int, shape: Sequence[int], sizes: Mapping[str, int]
) -> PartitionSpec:
    """Move the axis pipeline from one dim to the first other dim that it divides, or else remove it.

    Args:
      spec: the PartitionSpec of an array.
      dim: the dim that must not be sharded over pipeline.
      shape: the shape of the array.
      sizes: axis -> size.

    >>> tuple(move_pipeline(PartitionSpec("pipeline", "fsdp"), 0, (7, 8), {"pipeline": 2, "fsdp": 2}))
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
    """Return every axis of a PartitionSpec, in order."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return tuple(axis for entry in entries for axis in entry)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The placement of one array: a row of the sharding table.

    Args:
      path: the path in the state.
      shape: its global shape in elements.
      dtype: its dtype's name.
      dims: its dim names, None where it has none.
      spec: its PartitionSpec.
      num_bytes: bytes of the whole array.
      device_bytes: bytes of one shard.
      copies: number of replicas of each shard; 1 means fully sharded.
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
    arrays: Mapping[str, NamedArray], like: Any, specs: Any, sizes: Mapping[str, int]
) -> tuple[Row, ...]:
    """Return a row for each array (or shape) of a pytree, in its order."""
    leaves = jax.tree.leaves(like)
    spec_leaves = jax.tree.leaves(specs)
    return tuple(
        _make_row(path, named, leaf, spec, sizes)
        for (path, named), leaf, spec in zip(arrays.items(), leaves, spec_leaves, strict=True)
    )


def _make_row(path: str, named: NamedArray, leaf: Any, spec: PartitionSpec, sizes: Mapping[str, int]) -> Row:
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
    """Format a spec for the table, without axes of size 1: `- x fsdp x tensor`, or `replicated`."""
    entries = [((e,) if isinstance(e, str) else e or ()) for e in spec]
    words = ["+".join(axis for axis in entry if sizes[axis] > 1) for entry in entries]
    return " x ".join(word or "-" for word in words) if any(words) else "replicated"


def totals(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Return (bytes of all arrays, bytes per device, bytes of the arrays replicated on every device)."""
    replicated = sum(row.num_bytes for row in rows if row.device_bytes == row.num_bytes)
    return sum(row.num_bytes for row in rows), sum(row.device_bytes for row in rows), replicated
