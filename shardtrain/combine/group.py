"""Groups of ranks that combiners communicate in: the indices of a mesh axis, or gathered arrays of all ranks.

A combiner uses only the methods of `Group`, so it runs on a mesh, on gathered arrays and over MPI
(`islands/bridge.py`). Next: `combiner.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax

Op = Literal["sum", "max"]


class Group(Protocol):
    """Ranks 0 to size - 1, each with arrays of the same shapes. All ranks make the same calls."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def index(self) -> int | jax.Array:
        """The index of this rank: a number over MPI, traced on a mesh."""
        ...

    def all_reduce(self, x: jax.Array, span: int | None = None) -> jax.Array:
        """Sum over each block of `span` consecutive ranks, with the same bits on all of them.

        Args:
          x: float32 or int32.
          span: a divisor of the size; None means all ranks.
        """
        ...

    def exchange(self, x: jax.Array, sources: Sequence[int]) -> jax.Array:
        """Permute arrays over ranks: rank i receives the array of rank `sources[i]`.

        Args:
          x: any dtype of 8, 16 or 32 bits.
          sources: a permutation of the ranks.
        """
        ...

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Gather the arrays of all ranks: (size, *x.shape), any dtype of 8, 16 or 32 bits."""
        ...

    def whole(self, x: jax.Array, op: Op = "sum", *, stages: bool = False) -> jax.Array:
        """Reduce values of this rank's shards of the leaves to values of the whole leaves.

        Args:
          x: (..., L), the last dim counts the leaves in the order of the tree.
          op: how the values of shards are reduced.
          stages: whether to reduce over the stages of a pipeline too, whose leaves of one name are different
            layers; leaves that all stages have count once.
        """
        ...


@dataclass(frozen=True)
class MeshGroup:
    """The indices of one mesh axis, inside a shard_map that is manual over all axes, or inside a vmap.

    The shard_map needs `check_vma=False`.

    Args:
      axis: the mesh axis, or the axis_name of the vmap.
      size: the size of the axis.
      leaf_axes: the axes that shard each leaf; () if no leaf is sharded.
      shard_axes: axis -> size, for all axes that shard any leaf.
      stage_axes: axis -> size, for axes that shard layers: each index has other layers of the same names.
      outer: the group whose arrays were gathered into the dim of a vmap over `axis`; it reduces values of
        shards. None if no arrays were gathered.

    >>> group = MeshGroup("data", 4)
    >>> jax.vmap(group.all_reduce, axis_name="data")(jnp.arange(4.0)).tolist()
    [6.0, 6.0, 6.0, 6.0]
    """

    axis: str
    size: int
    leaf_axes: Sequence[tuple[str, ...]] = ()
    shard_axes: Mapping[str, int] | None = None
    stage_axes: Mapping[str, int] | None = None
    outer: Group | None = None

    @property
    def index(self) -> int | jax.Array:
        """The index of this rank."""
        return lax.axis_index(self.axis) if self.size > 1 else 0

    def all_reduce(self, x: jax.Array, span: int | None = None) -> jax.Array:
        """Sum over blocks of `span` ranks, see `Group`."""
        if span in (None, self.size):
            return lax.psum(x, self.axis)
        if span == 1:
            return x
        if self.axis in jax.sharding.get_abstract_mesh().manual_axes:
            blocks = [list(range(first, first + span)) for first in range(0, self.size, span)]
            return lax.psum(x, self.axis, axis_index_groups=blocks)
        blocks = lax.all_gather(x, self.axis).reshape(self.size // span, span, *x.shape)
        return lax.dynamic_index_in_dim(blocks.sum(1), self.index // span, keepdims=False)

    def exchange(self, x: jax.Array, sources: Sequence[int]) -> jax.Array:
        """Permute arrays over ranks, see `Group`."""
        pairs = [(source, rank) for rank, source in enumerate(sources)]
        return _from_bits(lax.ppermute(_to_bits(x), self.axis, pairs), x.dtype)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Gather the arrays of all ranks, see `Group`."""
        return _from_bits(lax.all_gather(_to_bits(x), self.axis), x.dtype)

    def whole(self, x: jax.Array, op: Op = "sum", *, stages: bool = False) -> jax.Array:
        """Reduce values of shards to values of whole leaves, see `Group`."""
        if self.outer is not None:
            return self.outer.whole(x, op, stages=stages)
        over = (*(self.shard_axes or ()), *((self.stage_axes or ()) if stages else ()))
        if not over:
            return x
        if op == "max":
            return lax.pmax(x, over)
        first = {axis: lax.axis_index(axis) == 0 for axis in over}
        # of devices with equal copies of a shard only the first one counts
        counted = [
            jnp.stack([jnp.bool_(True), *(first[axis] for axis in over if axis not in sharded)]).all()
            for sharded in self.leaf_axes
        ]
        return lax.psum(jnp.where(jnp.stack(counted), x, 0), over) if counted else x


def _to_bits(x: jax.Array) -> jax.Array:
    # compilers may send 16-bit floats as 32 bits, never 16-bit integers
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x
