"""Cut the tokens that come next out of those of a row, where a mesh may shard sequences."""

import jax
from jax.sharding import PartitionSpec

from shardtrain.axes import CONTEXT


def without_first(x_BT: jax.Array) -> jax.Array:
    """Return all but the first of each row, (B, T - 1), which no device cuts out of a shard.

    Cut out of shards, a position at each border would be sent to another device, by a permute that never
    ends in stages of a pipeline, which all permutes of a mesh wait for.

    Args:
      x_BT: (B, T), such as tokens.

    >>> import jax.numpy as jnp
    >>> without_first(jnp.arange(4)[None]).tolist()
    [[1, 2, 3]]
    """
    x_BT = x_BT[:, 1:]
    if jax.sharding.get_abstract_mesh().shape.get(CONTEXT, 1) == 1:
        return x_BT
    return jax.lax.with_sharding_constraint(x_BT, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))
