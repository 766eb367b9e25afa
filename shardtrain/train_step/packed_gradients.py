"""Pack the small gradients of a bucket into one array, inside the program that computes them.

The program of the update takes them apart again. So a bucket has few arrays, each of which costs a fixed time
between the programs, and packing costs no program of its own. Next: `island_combiner.py`, `island_step.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.combine.combiner import contribution
from shardtrain.combine.mean import unpacked

PACKED_BELOW = 1 << 19
"""Elements of a gradient from which it is sent by itself: 2 MB cost as much to copy as to send alone."""


class PackedGradients:
    """How gradients are packed: one array (n,) of each bucket's small ones, and the large ones as they are.

    Args:
      buckets: path -> what is sent, bucket by bucket; all of one dtype.
    """

    def __init__(self, buckets: Sequence[Mapping[str, jax.ShapeDtypeStruct]]) -> None:
        self._small = {
            f"small leaves of bucket {number}": {
                path: leaf for path, leaf in bucket.items() if leaf.size < PACKED_BELOW
            }
            for number, bucket in enumerate(buckets)
        }
        self._buckets = buckets

    @property
    def buckets(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Return name -> what is sent after packing, bucket by bucket."""
        shapes = [dict(bucket) for bucket in self._buckets]
        for bucket, (name, small) in zip(shapes, self._small.items(), strict=True):
            leaves = [bucket.pop(path) for path in small]
            if leaves:
                size = sum(leaf.size for leaf in leaves)
                bucket[name] = jax.ShapeDtypeStruct((size,), leaves[0].dtype)
        return shapes

    def shardings(self, by_path: Mapping[str, Any], whole: Any) -> dict[str, Any]:
        """Return name -> the sharding after packing.

        Args:
          by_path: path -> the sharding of each gradient.
          whole: the sharding of an array that every device has: that of packed ones.
        """
        return {name: by_path.get(name, whole) for bucket in self.buckets for name in bucket}

    def pack(self, grads: Mapping[str, jax.Array], count: jax.Array, whole: Any) -> dict[str, jax.Array]:
        """Return name -> array after packing, in a jit; zeros without examples, see `combiner.contribution`.

        Args:
          grads: path -> gradient.
          count: float32 scalar, examples.
          whole: as of `shardings`; small gradients that are sharded are gathered.
        """
        paths = {path for small in self._small.values() for path in small}
        packed = {path: g if path in paths else contribution(g, count) for path, g in grads.items()}
        for name, small in self._small.items():
            leaves = [lax.with_sharding_constraint(packed.pop(path), whole) for path in small]
            if leaves:
                # a branch of its own copies memory, where XLA would compute gradients element by element; and
                # zeros for an island without examples cost no pass over those of the others
                packed[name] = lax.cond(
                    count != 0, _joined, lambda leaves: jnp.zeros_like(_joined(leaves)), leaves
                )
        return packed

    def unpack(self, packed: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return path -> gradient, in a jit: the inverse of `pack`."""
        grads = dict(packed)
        for name, small in self._small.items():
            if small:
                arrays = unpacked(grads.pop(name), list(small.values()))
                grads.update(zip(small, arrays, strict=True))
        return grads


def _joined(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
