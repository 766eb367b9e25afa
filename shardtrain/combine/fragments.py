"""Divide the parameters into fragments that replicas combine in turn, so that less is sent at a time.

Each layer of each array is assigned separately, the largest first, so that fragments have similar sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardtrain.functional.model import group_by_path, path_text


@dataclass(frozen=True)
class Fragment:
    """A part of a tree of arrays.

    Args:
      rows: path of each array of the fragment -> rows of its first dim; None means the whole array.
    """

    rows: Mapping[str, tuple[int, ...] | None]

    def take(self, tree: Any, lead: int = 0) -> dict[str, Any]:
        """Return path -> this fragment's part of each of its arrays.

        Args:
          tree: the whole tree of arrays or shapes.
          lead: number of leading dims before the arrays' own, such as a dim of replicas.
        """
        found = group_by_path(tree)
        return {
            path: found[path] if rows is None else _take_rows(found[path], rows, lead)
            for path, rows in self.rows.items()
        }

    def select(self, specs: Any) -> dict[str, PartitionSpec]:
        """Return path -> the PartitionSpec of each array of this fragment."""
        found = group_by_path(specs)
        return {path: found[path] for path in self.rows}

    def put(self, tree: Any, parts: Mapping[str, Any], lead: int = 0) -> Any:
        """Return the tree with this fragment's parts replaced, see `take`."""

        def leaf(path: Any, x: Any) -> Any:
            name = path_text(path)
            if name not in self.rows:
                return x
            rows, part = self.rows[name], parts[name].astype(x.dtype)
            return part if rows is None else x.at[(slice(None),) * lead + (np.array(rows),)].set(part)

        return jax.tree.map_with_path(leaf, tree)


def _take_rows(x: Any, rows: tuple[int, ...], lead: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*x.shape[:lead], len(rows), *x.shape[lead + 1 :]), x.dtype)
    return jnp.take(x, np.array(rows), axis=lead)


def make_fragments(
    tree: Any, stacked: frozenset[str], number: int, num_stages: int = 1
) -> tuple[Fragment, ...]:
    """Divide a tree into fragments.

    Args:
      tree: arrays or shapes.
      stacked: paths of the arrays whose first dim counts layers, see `replicas.find_stacked_paths`.
      number: number of fragments; 1 is the whole tree.
      num_stages: stages of a pipeline in the mesh, each with equally many consecutive layers; every fragment
        has the same layers of each stage.

    Raises:
      ValueError: there are fewer layers and other arrays than fragments.

    >>> arrays = {"up": jnp.ones((3, 8)), "table": jnp.ones(4)}
    >>> [dict(each.rows) for each in make_fragments(arrays, frozenset({"up"}), 2)]
    [{'up': (0, 2)}, {'table': None, 'up': (1,)}]
    """
    leaves = group_by_path(tree)
    if number == 1:
        return (Fragment(dict.fromkeys(leaves)),)
    # what is assigned: (number of elements, path, layer of each stage); layer is None for a whole array
    parts: list[tuple[int, str, int | None]] = [
        (leaves[path].size, path, None) for path in leaves.keys() - stacked
    ]
    for path in stacked & leaves.keys():
        depth = leaves[path].shape[0] // num_stages
        parts += [(leaves[path].size // depth, path, layer) for layer in range(depth)]
    if len(parts) < number:
        raise ValueError(
            f"fragments is {number}, but there are only enough layers and other arrays for {len(parts)}"
            f" (of a pipeline: in this stage); use --fragments {len(parts)} or fewer"
        )
    # the largest first, each to the fragment with the fewest elements, so that fragments are equally large
    layers: list[dict[str, list[int] | None]] = [{} for _ in range(number)]
    sizes = [0] * number
    for size, path, layer in sorted(parts, key=lambda part: (-part[0], part[1], part[2] or 0)):
        smallest = min(range(number), key=lambda fragment: (sizes[fragment], len(layers[fragment])))
        layers[smallest][path] = None if layer is None else [*(layers[smallest].get(path) or ()), layer]
        sizes[smallest] += size

    def rows(path: str, dealt: list[int] | None) -> tuple[int, ...] | None:
        if dealt is None:
            return None
        depth = leaves[path].shape[0] // num_stages
        return tuple(stage * depth + layer for stage in range(num_stages) for layer in dealt)

    # the same order on every rank
    return tuple(Fragment({path: rows(path, own[path]) for path in leaves if path in own}) for own in layers)


def restore_paths(tree: Any, found: Mapping[str, Any]) -> Any:
    """Return a tree of the same structure with leaves given by path."""
    return jax.tree.map_with_path(lambda path, _: found[path_text(path)], tree)
