"""How replicas become one: by which combiner, on gradients or deltas, and the combiner run on a mesh.

Layers that a scan stacks are cut apart first, so that "per leaf" means per layer.
Next: `train_step/state.py` (what a replica keeps for itself), `train_step/step.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardtrain import axes
from shardtrain.combine import Combiner, MeshGroup, make_combiner
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error
from shardtrain.functional.model import path_text
from shardtrain.sharding.array_dims import Named
from shardtrain.sharding.specs import spec_axes, with_leading_dim


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How the replicas of a run become one.

    Replicas are the islands, where there are several (each of them the mean or sum of its own devices),
    else the indices of the mesh's data axis.

    Args:
      by: a combiner by name, such as "mean", "adasum", "int8+adasum" (see `combine.make_combiner`), or
        any `combine.Combiner`.
      on: "gradients", or the "deltas" that each replica's own optimizer makes of its own gradient
        (Horovod's Adasum). The optimizer's state then belongs to the replica.
      local_steps: steps that a replica takes alone before its delta is combined; more than 1 needs deltas.
      inside: what an island makes of its own devices' gradients before they cross: their mean, or their
        sum, the mean times the number of its replicas.

    Short form: what `by` takes.

    Raises:
      ValueError: lists every value of a wrong kind, and everything that does not fit together.
    """

    by: str | Combiner = "mean"
    on: Literal["gradients", "deltas"] = "gradients"
    local_steps: int = 1
    inside: Literal["mean", "sum"] = "mean"

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """The fields that a bare value stands for; None: it is no short form."""
        return {"by": value} if isinstance(value, str | Combiner) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.local_steps < 1:
            problems.append(f"local_steps is {self.local_steps}; use 1 or more")
        if self.local_steps > 1 and self.on == "gradients":
            problems.append(
                f"local_steps is {self.local_steps}, but gradients are combined in every step; use deltas"
            )
        if self.inside == "sum" and self.on == "deltas":
            problems.append("inside is 'sum', but deltas are of an island's own mean gradient; use mean")
        if problems:
            raise problems_error("replicas cannot be combined like this", problems)
        if isinstance(self.by, str):
            make_combiner(self.by)

    @property
    def combiner(self) -> Combiner:
        """The combiner itself."""
        return make_combiner(self.by) if isinstance(self.by, str) else self.by

    @property
    def is_mean(self) -> bool:
        """The ordinary step: one gradient, the mean over all examples."""
        return self.by == "mean" and self.on == "gradients"

    @property
    def on_deltas(self) -> bool:
        """Each replica has an optimizer of its own."""
        return self.on == "deltas"


def stacked_paths(arrays: Mapping[str, Named], specs: Any) -> frozenset[str]:
    """The arrays whose first dim counts layers, all of which each device holds.

    The axis pipeline is none that would keep layers together: a mesh where it is above 1 has no combiner.

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


def cut(tree: Any, stacked: frozenset[str]) -> dict[str, Any]:
    """A tree as path -> array, stacked layers apart: blocks/up becomes blocks/up/0, blocks/up/1.

    Args:
      tree: of arrays or shapes.
      stacked: paths of arrays whose first dim counts layers.

    >>> cut({"up": jax.ShapeDtypeStruct((2, 3), jnp.float32)}, frozenset({"up"}))["up/1"].shape
    (3,)
    """
    pieces = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = path_text(path)
        if name not in stacked:
            pieces[name] = leaf
            continue
        for i, label in enumerate(_layers(name, leaf.shape[0])):
            abstract = isinstance(leaf, jax.ShapeDtypeStruct)
            pieces[label] = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if abstract else leaf[i]
    return pieces


def joined(pieces: Mapping[str, Any], like: Any, stacked: frozenset[str]) -> Any:
    """The tree again that `cut` took apart.

    Args:
      pieces: path -> array.
      like: a tree of the same paths and shapes.
      stacked: as for `cut`.
    """

    def leaf(path: Any, leaf: Any) -> Any:
        name = path_text(path)
        if name not in stacked:
            return pieces[name]
        return jnp.stack([pieces[label] for label in _layers(name, leaf.shape[0])])

    return jax.tree.map_with_path(leaf, like)


def _layers(name: str, number: int) -> list[str]:
    # of one width, so that their order as text, which is jax's of a dict, is their order as numbers
    return [f"{name}/{i:0{len(str(max(number - 1, 0)))}d}" for i in range(number)]


def shard_shapes(abstract: Any, specs: Any, sizes: Mapping[str, int]) -> Any:
    """The shapes of what one device holds.

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
    specs: Any,
    stacked: frozenset[str],
    mesh: Mesh,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Combine over the data axis of a mesh, inside jit: each device works on its own shards.

    Args:
      combiner: any.
      tree: each leaf (data, ...), the mean of each replica over its own examples.
      counts: float32 (data,), their numbers of examples.
      state: the combiner's, each leaf (devices, ...).
      specs: the PartitionSpec of each leaf without its first dim; it may not name the data axis.
      stacked: see `cut`.
      mesh: the mesh.

    Returns:
      (the combined tree, without the first dim; the new state; metrics, as the combiner gives them,
      arrays (L,) in the order of `sorted(cut(tree))`).
    """
    replica_specs = with_leading_dim(specs, axes.DATA)
    by_device = PartitionSpec(mesh.axis_names)
    shard_axes = {a: n for a, n in mesh.shape.items() if a != axes.DATA and n > 1}
    leaf_axes = {
        path_text(path): tuple(axis for axis in spec_axes(spec) if axis in shard_axes)
        for path, spec in jax.tree.leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    }

    def combine_shard(tree: Any, counts: jax.Array, state: Any) -> Any:
        tree, state = jax.tree.map(lambda x: x[0], (tree, state))
        pieces = cut(tree, stacked)
        of_leaf = [
            leaf_axes.get(label) or leaf_axes.get(label.rpartition("/")[0], ()) for label in sorted(pieces)
        ]
        group = MeshGroup(axes.DATA, mesh.shape[axes.DATA], of_leaf, shard_axes)
        found = combiner.combine(pieces, counts[0], state, group)
        return joined(found.value, tree, stacked), jax.tree.map(lambda x: x[None], found.state), found.metrics

    return jax.shard_map(
        combine_shard,
        mesh=mesh,
        in_specs=(replica_specs, PartitionSpec(axes.DATA), by_device),
        out_specs=(specs, by_device, PartitionSpec()),
        check_vma=False,
    )(tree, counts, state)
