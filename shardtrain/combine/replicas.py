"""A combiner run over the data axis of a mesh.

Stacked layers are split first, so that "per leaf" means per layer.
Next: `train_step/state.py` (what a replica keeps for itself), `train_step/step.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardtrain import axes
from shardtrain.combine import Combiner, MeshGroup
from shardtrain.functional.model import path_text
from shardtrain.sharding.array_dims import Named
from shardtrain.sharding.specs import spec_axes, with_leading_dim


def stacked_paths(arrays: Mapping[str, Named], specs: Any) -> frozenset[str]:
    """Return the paths of arrays that stack layers along their first dim, unsharded along it.

    The axis pipeline does not count: a mesh where it is above 1 has no combiner.

    Args:
      arrays: path -> dims and shape, in the order of the leaves of `specs`.
      specs: the PartitionSpec of each.
    """
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return frozenset(
        path
        for (path, named), spec in zip(arrays.items(), leaves, strict=True)
        if named.dims
        and named.dims[0] == axes.LAYERS
        and not set(spec_axes(PartitionSpec(*spec[:1]))) - {axes.PIPELINE}
    )


def split_layers(tree: Any, stacked: frozenset[str]) -> dict[str, Any]:
    """Return a tree as path -> array, with stacked layers split: blocks/up becomes blocks/up/0, blocks/up/1.

    Args:
      tree: a tree of arrays or shapes.
      stacked: paths of arrays whose first dim counts layers.

    >>> split_layers({"up": jax.ShapeDtypeStruct((2, 3), jnp.float32)}, frozenset({"up"}))["up/1"].shape
    (3,)
    """
    layers = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = path_text(path)
        if name not in stacked:
            layers[name] = leaf
            continue
        for i, label in enumerate(_layers(name, leaf.shape[0])):
            abstract = isinstance(leaf, jax.ShapeDtypeStruct)
            layers[label] = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if abstract else leaf[i]
    return layers


def stack_layers(layers: Mapping[str, Any], like: Any, stacked: frozenset[str]) -> Any:
    """Return the tree that `split_layers` split.

    Args:
      layers: path -> array.
      like: a tree of the paths and shapes of that tree.
      stacked: as for `split_layers`.
    """

    def leaf(path: Any, leaf: Any) -> Any:
        name = path_text(path)
        if name not in stacked:
            return layers[name]
        return jnp.stack([layers[label] for label in _layers(name, leaf.shape[0])])

    return jax.tree.map_with_path(leaf, like)


def _layers(name: str, number: int) -> list[str]:
    # of one width, so that their order as text, which is jax's of a dict, is their order as numbers
    return [f"{name}/{i:0{len(str(max(number - 1, 0)))}d}" for i in range(number)]


def shard_shapes(abstract: Any, specs: Any, sizes: Mapping[str, int]) -> Any:
    """Return the shapes of the shards that one device holds.

    Args:
      abstract: a tree of shapes.
      specs: its PartitionSpecs.
      sizes: axis -> size.
    """

    def shard(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        parts = [math.prod(sizes[axis] for axis in spec_axes(PartitionSpec(entry))) for entry in spec]
        parts += [1] * (len(leaf.shape) - len(parts))
        return jax.ShapeDtypeStruct(tuple(n // p for n, p in zip(leaf.shape, parts, strict=True)), leaf.dtype)

    return jax.tree.map(shard, abstract, specs)


def combine_replicas(
    combiner: Combiner,
    tree: Any,
    counts: jax.Array,
    state: Any,
    *,
    specs: Any,
    stacked: frozenset[str],
    mesh: Mesh,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Combine over the data axis of a mesh, inside jit; each device combines its own shards.

    Args:
      combiner: any.
      tree: each leaf (data, ...), the mean of each replica over its own examples.
      counts: float32 (data,), their numbers of examples.
      state: the combiner's, each leaf (devices, ...).
      specs: the PartitionSpec of each leaf without its first dim; it may not name the data axis.
      stacked: see `split_layers`.
      mesh: the mesh.

    Returns:
      (the combined tree, without the first dim; the new state; the combiner's metrics, arrays (L,) in the
      order of `sorted(split_layers(tree))`).
    """
    replica_specs = with_leading_dim(specs, axes.DATA)
    by_device = PartitionSpec(mesh.axis_names)
    # the axes over which a replica's own arrays are sharded: sums over a whole array go over these, too
    shard_axes = {a: n for a, n in mesh.shape.items() if a != axes.DATA and n > 1}
    leaf_axes = {
        path_text(path): tuple(axis for axis in spec_axes(spec) if axis in shard_axes)
        for path, spec in jax.tree.leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    }

    def combine_shard(tree: Any, counts: jax.Array, state: Any) -> Any:
        # on a device the leading dim of replicas has size 1: its own replica
        tree, state = jax.tree.map(lambda x: x[0], (tree, state))
        layers = split_layers(tree, stacked)
        # a layer is sharded like the array that it was stacked in
        of_leaf = [
            leaf_axes.get(label) or leaf_axes.get(label.rpartition("/")[0], ()) for label in sorted(layers)
        ]
        group = MeshGroup(axes.DATA, mesh.shape[axes.DATA], of_leaf, shard_axes)
        found = combiner.combine(layers, counts[0], state, group)
        return (
            stack_layers(found.value, tree, stacked),
            jax.tree.map(lambda x: x[None], found.state),
            found.metrics,
        )

    return jax.shard_map(
        combine_shard,
        mesh=mesh,
        in_specs=(replica_specs, PartitionSpec(axes.DATA), by_device),
        out_specs=(specs, by_device, PartitionSpec()),
        check_vma=False,
    )(tree, counts, state)
