"""Run a combiner over the data axis of a mesh.

Stacked layers are split first, so that "per leaf" means per layer. Next: `train_step/step.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardtrain import axes
from shardtrain.combine import Combiner, MeshGroup
from shardtrain.functional.model import path_text
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.specs import add_leading_dim, spec_axes


def find_stacked_paths(arrays: Mapping[str, NamedArray], specs: Any) -> frozenset[str]:
    """Return the paths of arrays that stack layers along their first dim.

    That dim is unsharded, or sharded over only the axis pipeline, so that each stage has whole layers.

    Args:
      arrays: path -> dims and shape, in the order of the leaves of `specs`.
      specs: the PartitionSpec of each.
    """
    leaves = jax.tree.leaves(specs)
    return frozenset(
        path
        for (path, named), spec in zip(arrays.items(), leaves, strict=True)
        if named.dims
        and named.dims[0] == axes.LAYERS
        and not set(spec_axes(PartitionSpec(*spec[:1]))) - {axes.PIPELINE}
    )


def split_layers(tree: Any, stacked: frozenset[str]) -> dict[str, Any]:
    """Return path -> array with stacked layers split: blocks/up becomes blocks/up/0, blocks/up/1.

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
        for i, label in enumerate(_list_layers(name, leaf.shape[0])):
            abstract = isinstance(leaf, jax.ShapeDtypeStruct)
            layers[label] = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if abstract else leaf[i]
    return layers


def stack_layers(layers: Mapping[str, Any], like: Any, stacked: frozenset[str]) -> Any:
    """Stack layers again, the reverse of `split_layers`.

    Args:
      layers: path -> array.
      like: a tree with the paths and shapes of the result.
      stacked: as for `split_layers`.
    """

    def leaf(path: Any, leaf: Any) -> Any:
        name = path_text(path)
        if name not in stacked:
            return layers[name]
        return jnp.stack([layers[label] for label in _list_layers(name, leaf.shape[0])])

    return jax.tree.map_with_path(leaf, like)


def _list_layers(name: str, number: int) -> list[str]:
    # of one width, so that their order as text, which is jax's of a dict, is their order as numbers
    return [f"{name}/{i:0{len(str(max(number - 1, 0)))}d}" for i in range(number)]


def list_stage_entries(
    params: Any, stacked: frozenset[str], num_stages: int, stored_blocks: Sequence[int]
) -> dict[str, int]:
    """Return label -> index in the metric (L,) of a pipeline in a mesh, sorted by label.

    Args:
      params: arrays or shapes, with blocks as the mesh stores them.
      stacked: see `split_layers`.
      num_stages: number of stages.
      stored_blocks: the block at each stored position, -1 for padding, which has no label.

    >>> table = {"up": jnp.ones((4, 8)), "wte": jnp.ones(4)}
    >>> list_stage_entries(table, frozenset({"up"}), 2, (0, -1, 1, 2))
    {'up/0': 0, 'up/1': 3, 'up/2': 4, 'wte': 2}
    """
    # label on a stage -> the array, and the row of the stage
    places: dict[str, tuple[str, int | None]] = {}
    depth = len(stored_blocks) // num_stages
    for path, _ in jax.tree.leaves_with_path(params):
        name = path_text(path)
        rows = enumerate(_list_layers(name, depth)) if name in stacked else [(None, name)]
        places |= {label: (name, row) for row, label in rows}
    found = {}
    for stage in range(num_stages):
        for number, label in enumerate(sorted(places), stage * len(places)):
            name, row = places[label]
            if row is None:
                found.setdefault(name, number)
            elif (block := stored_blocks[stage * depth + row]) >= 0:
                found[_list_layers(name, max(stored_blocks) + 1)[block]] = number
    return dict(sorted(found.items()))


def list_combined_entries(specs: Any) -> tuple[list[str], list[int] | None]:
    """Return the labels of a combiner's metric (L,) in a mesh, and `entries` for `combine_replicas`.

    Args:
      specs: `placement.Specs`.
    """
    stacked, stages = find_stacked_paths(specs.arrays, specs.sharded), specs.stages
    if stages is None:
        return sorted(split_layers(specs.trained, stacked)), None
    found = list_stage_entries(specs.trained, stacked, stages.num_stages, stages.stored_blocks)
    return [*found], [*found.values()]


def shard_shapes(abstract: Any, specs: Any, sizes: Mapping[str, int]) -> Any:
    """Return the shapes of one device's shards.

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
    entries: Sequence[int] | None = None,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Combine over the data axis of a mesh, inside jit; each device combines its own shards.

    Args:
      combiner: any combiner.
      tree: each leaf (data, ...), the mean of each replica over its own examples.
      counts: float32 (data,), the replicas' numbers of examples.
      state: the combiner's state, each leaf (devices, ...).
      specs: the PartitionSpec of each leaf without its first dim; it may not name the data axis.
      stacked: see `split_layers`.
      mesh: the mesh. On its axis pipeline each stage combines its own layers, and all stages combine in the
        same way what they share.
      entries: indices of the entries of metrics (L,) to return, see `list_stage_entries`; None returns all.

    Returns:
      (the combined tree, without the first dim if the value is common; the new state; the combiner's metrics,
      arrays (L,) in the order of `sorted(split_layers(tree))`, or the given entries of them).
    """
    replica_specs = add_leading_dim(specs, axes.DATA)
    by_device = PartitionSpec(mesh.axis_names)
    # the axes over which a replica's own arrays are sharded: sums over a whole array go over these too; over
    # stages, which have other layers or the same array, only if all arrays are one vector
    own_axes = {a: n for a, n in mesh.shape.items() if a != axes.DATA and n > 1}
    shard_axes = {a: n for a, n in own_axes.items() if a != axes.PIPELINE}
    stage_axes = {a: n for a, n in own_axes.items() if a == axes.PIPELINE}
    num_stages = mesh.shape.get(axes.PIPELINE, 1)
    leaf_axes = {
        path_text(path): tuple(axis for axis in spec_axes(spec) if axis in own_axes)
        for path, spec in jax.tree.leaves_with_path(specs)
    }

    def combine_shard(tree: Any, counts: jax.Array, state: Any) -> Any:
        # on a device the leading dim of replicas has size 1: its own replica
        tree, state = jax.tree.map(lambda x: x[0], (tree, state))
        layers = split_layers(tree, stacked)
        # a layer is sharded like the array that it was stacked in
        of_leaf = [
            leaf_axes.get(label) or leaf_axes.get(label.rpartition("/")[0], ()) for label in sorted(layers)
        ]
        group = MeshGroup(axes.DATA, mesh.shape[axes.DATA], of_leaf, shard_axes, stage_axes)
        found = combiner.combine(layers, counts[0], state, group)
        metrics = found.metrics if num_stages == 1 else jax.tree.map(of_stages, found.metrics)
        value, state = stack_layers(found.value, tree, stacked), jax.tree.map(lambda x: x[None], found.state)
        return value if combiner.is_common else jax.tree.map(lambda x: x[None], value), state, metrics

    def of_stages(metric: jax.Array) -> jax.Array:
        if metric.ndim:
            return jax.lax.all_gather(metric, axes.PIPELINE, tiled=True)
        return jax.lax.pmean(metric, axes.PIPELINE)

    value, state, metrics = jax.shard_map(
        combine_shard,
        mesh=mesh,
        in_specs=(replica_specs, PartitionSpec(axes.DATA), by_device),
        out_specs=(specs if combiner.is_common else replica_specs, by_device, PartitionSpec()),
        check_vma=False,
    )(tree, counts, state)
    if entries is not None:
        metrics = {name: x[np.array(entries)] if x.ndim else x for name, x in metrics.items()}
    return value, state, metrics
