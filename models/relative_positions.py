"""Relative positions: a number for each head and each bucket of distances, added to scores of attention.

The encoder-decoder has one table for all blocks of its encoder and one for those of its decoder.

References:
  Raffel et al. 2019, Exploring the limits of transfer learning (T5), arXiv 1910.10683, section 2.1.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, HEADS
from shardtrain.models.layers import parameter


def relative_table(num_buckets: int, num_heads: int, rngs: nnx.Rngs) -> nnx.Param:
    """Make the table of a number for each bucket and head, small at first."""
    values = 0.02 * jax.random.normal(rngs.params(), (num_buckets, num_heads), jnp.float32)
    return parameter(values, (None, HEADS))


def find_bucket(distances: np.ndarray, *, num_buckets: int, max_distance: int, causal: bool) -> np.ndarray:
    """Return the bucket of each distance.

    Half of the buckets are for one distance each, the others for longer ones, by their logarithm.

    Args:
      distances: int, of any shape: the position of a key less that of its query.
      num_buckets: number of buckets; where a query sees both sides, half of them are for keys behind it.
      max_distance: from here on all distances are in the last bucket.
      causal: whether a query sees no keys behind it (their bucket is 0).

    Returns:
      int32, shaped as `distances`.

    >>> distances = np.array([0, -1, -7, -8, -15, -16, -127, -500, 1, 500])
    >>> find_bucket(distances, num_buckets=32, max_distance=128, causal=False).tolist()
    [0, 1, 7, 8, 9, 10, 15, 15, 17, 31]
    """
    behind = np.zeros_like(distances)
    if not causal:
        num_buckets //= 2
        behind = (distances > 0) * num_buckets
        distances = -np.abs(distances)
    away = np.maximum(-distances, 0)
    exact = num_buckets // 2
    # in float32, as the published models were trained
    far = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact))
    far = far / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + far.astype(np.int32), num_buckets - 1)
    return (behind + np.where(away < exact, away, far)).astype(np.int32)


def relative_bias(
    table_BNH: jax.Array, num_queries: int, num_keys: int, *, max_distance: int, causal: bool
) -> jax.Array:
    """Return what is added to the scores of attention, (batch, heads, num_queries, num_keys).

    Args:
      table_BNH: a number for each bucket and head, the same in each row of the batch: so the parts of a
        pipeline cut it like all activations.
      num_queries: positions of the queries, from 0 on.
      num_keys: those of the keys.
      max_distance: see `find_bucket`.
      causal: likewise.
    """
    # one lookup for each distance, then each query takes those to its keys
    distances = np.arange(-num_queries + 1, num_keys)
    buckets = find_bucket(distances, num_buckets=table_BNH.shape[1], max_distance=max_distance, causal=causal)
    by_distance = jnp.take(table_BNH, buckets, axis=1)
    places = np.arange(num_keys)[None] - np.arange(num_queries)[:, None] + num_queries - 1
    bias_BHTS = jnp.take(by_distance.swapaxes(1, 2), places, axis=2)
    return with_logical_constraint(bias_BHTS, (BATCH, HEADS, None, None))


def compute_cached_bias(
    table_BNH: jax.Array, positions_BT: jax.Array, num_keys: int, *, max_distance: int
) -> jax.Array:
    """Return what is added to the scores of causal attention with a cache, (batch, heads, T, num_keys).

    Args:
      table_BNH: as for `relative_bias`.
      positions_BT: the position of each query, which may differ from row to row.
      num_keys: slots of the cache; the slot of a key is its position.
      max_distance: see `find_bucket`.
    """
    distances = np.arange(1 - num_keys, num_keys)
    buckets = find_bucket(distances, num_buckets=table_BNH.shape[1], max_distance=max_distance, causal=True)
    by_distance_BHS = jnp.take(table_BNH, buckets, axis=1).swapaxes(1, 2)
    places_BTS = jnp.arange(num_keys) - positions_BT[:, :, None] + num_keys - 1
    bias_BHTS = jax.vmap(lambda row, places: jnp.take(row, places, axis=1))(by_distance_BHS, places_BTS)
    return with_logical_constraint(bias_BHTS, (BATCH, HEADS, None, None))
