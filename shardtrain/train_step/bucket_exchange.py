"""The buckets in which islands exchange a tree, and the program that each runs over a group of islands.

It needs neither devices nor MPI, so that the same program also predicts the bytes of an exchange. Next:
`island_combiner.py`, which runs it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.combine import Combiner
from shardtrain.combine.combiner import mask_without_examples
from shardtrain.combine.fragments import group_by_path
from shardtrain.combine.mean import add_up, unpack
from shardtrain.combine.messages import CountingGroup, Message
from shardtrain.combine.replicas import find_stacked_paths, split_layers, stack_layers
from shardtrain.train_step.placement import Specs

PACKED_BELOW = 1 << 19
"""Elements from which a gradient is sent separately: copying 2 MB costs as much as sending it separately."""


class PackedGradients:
    """Packs the small gradients of each bucket into one array (n,), and leaves large ones unchanged.

    Args:
      buckets: for each bucket, path -> shape of what is sent; all of one dtype.
      packed_below: elements from which a gradient is not packed.
    """

    def __init__(
        self, buckets: Sequence[Mapping[str, jax.ShapeDtypeStruct]], packed_below: int = PACKED_BELOW
    ) -> None:
        self._small = {
            f"small leaves of bucket {number}": {
                path: leaf for path, leaf in bucket.items() if leaf.size < packed_below
            }
            for number, bucket in enumerate(buckets)
        }
        self._buckets = buckets

    @property
    def buckets(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """For each bucket, name -> shape of what is sent after packing."""
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
          whole: the replicated sharding, which packed arrays have.
        """
        return {name: by_path.get(name, whole) for bucket in self.buckets for name in bucket}

    def pack(self, grads: Mapping[str, jax.Array], count: jax.Array, whole: Any) -> dict[str, jax.Array]:
        """Return name -> array after packing, in a jit; zeros without examples.

        Args:
          grads: path -> gradient.
          count: float32 scalar, examples.
          whole: the replicated sharding; small sharded gradients are gathered.
        """
        paths = {path for small in self._small.values() for path in small}
        packed = {path: g if path in paths else mask_without_examples(g, count) for path, g in grads.items()}
        for name, small in self._small.items():
            leaves = [lax.with_sharding_constraint(packed.pop(path), whole) for path in small]
            if leaves:
                # a branch copies memory, while XLA would otherwise compute gradients element by element; and
                # it makes zeros for an island without examples without a pass over the gradients
                packed[name] = lax.cond(
                    count != 0, _concatenate, lambda leaves: jnp.zeros_like(_concatenate(leaves)), leaves
                )
        return packed

    def unpack(self, packed: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return path -> gradient, in a jit: the inverse of `pack`."""
        grads = dict(packed)
        for name, small in self._small.items():
            if small:
                arrays = unpack(grads.pop(name), list(small.values()))
                grads.update(zip(small, arrays, strict=True))
        return grads


def _concatenate(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


Assign = Callable[..., list[list[int]]]
"""`islands.buckets.BucketSizes.assign`."""

Shapes = dict[str, jax.ShapeDtypeStruct]


class BucketExchange:
    """The buckets of a tree, and the program that combines a bucket.

    Args:
      combiner: any combiner.
      specs: the specs of the state of an island.
      assign: arrays -> buckets.
      params: path -> shape of what is combined; None means all parameters. Frozen ones are not sent.
      of_sums: whether sums over examples are combined, for a mean; the result is their total.
      dtype: the dtype of what is combined: float32, or 16 bits.

    Attributes:
      sizes_bytes: bytes of the arrays of each bucket, before a codec.
      packing: packs gradients before they are sent.
      labels: names of the entries of a metric (L,): the paths of parameters, or of layers of stacked ones.
      buckets: for each bucket, path -> shape of what is sent.
      program: (arrays, group) -> outputs, in a jit over one device: the arrays are (path -> array, count,
        state, sums that are added up), the outputs (path -> array, state, metrics, sums).
    """

    def __init__(
        self,
        combiner: Combiner,
        specs: Specs,
        assign: Assign,
        params: Shapes | None = None,
        *,
        of_sums: bool = False,
        dtype: str = "float32",
    ) -> None:
        self._combiner = combiner
        self.program = self._add_up if of_sums else self._combine
        # a weighted sum is the same for a stack of layers as for each of them
        self._stacked = frozenset() if combiner.linear else find_stacked_paths(specs.arrays, specs.sharded)
        params = group_by_path(specs.abstract.params) if params is None else params
        leaves = [
            (path, jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)))
            for path, leaf in params.items()
            if path not in specs.frozen
        ]
        # leaves of one unit are sent in one bucket
        units = ["all"] * len(leaves) if combiner.across_leaves else None
        assigned = assign([leaf for _, leaf in leaves], units, is_stateless=of_sums)
        likes: list[Shapes] = [dict(leaves[i] for i in bucket) for bucket in assigned]
        self.sizes_bytes = [sum(x.dtype.itemsize * x.size for x in like.values()) for like in likes]
        self.labels = [label for like in likes for label in sorted(self.layers(like))]
        # other combiners need each gradient separately
        self.packing = PackedGradients(likes, PACKED_BELOW if of_sums else 0)
        self.buckets = self.packing.buckets

    def layers(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Split the stacked layers of a bucket, as the combiner receives them."""
        return split_layers(like, self._stacked)

    def messages(self, num_islands: int) -> list[Message]:
        """List the messages of an island in one exchange of all buckets, without computing anything."""
        group = CountingGroup(num_islands)

        def exchange(tree: Any) -> Any:
            state = self._combiner.init(self.layers(tree))
            return self.program((tree, jnp.float32(1), state, ()), group)

        for like in self.buckets:
            jax.eval_shape(exchange, like)
        return group.messages

    def _add_up(self, arrays: Any, group: Any) -> Any:
        tree, _, state, sums = arrays
        # small leaves are one message, of which sums are a part
        value, sums = add_up((tree, sums), group)
        return value, state, {}, sums

    def _combine(self, arrays: Any, group: Any) -> Any:
        tree, count, state, sums = arrays
        found = self._combiner.combine(self.layers(tree), count, state, group)
        value = stack_layers(found.value, tree, self._stacked)
        return value, found.state, found.metrics, add_up(sums, group)
