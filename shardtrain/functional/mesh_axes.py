"""Mesh axes of the activations of a traced model, and computations on the shards of each device."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AbstractMesh, AxisType, Mesh


def find_mesh_axes(*dims: str | None) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dim of an activation."""
    spec = logical_to_mesh_axes(dims) or ()
    return [axis_names(entry) for entry in (*spec, *(None,) * len(dims))][: len(dims)]


def axis_names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def num_devices(names: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Return the product of the sizes of some axes."""
    return math.prod(sizes.get(name, 1) for name in names)


def auto_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Return the axes of a mesh that are not manual yet."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind is AxisType.Auto}


def map_shards(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return a function that is computed on the shards of each device.

    Every axis is manual: collectives over one axis would gather what the others shard.

    Args:
      function: shards of this device -> shards of the results.
      in_specs: of the arguments, see `jax.shard_map`.
      out_specs: of the results.
    """
    axes = auto_axes(jax.sharding.get_abstract_mesh())
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)
