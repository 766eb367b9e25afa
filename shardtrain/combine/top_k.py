"""A codec that sends the elements of greatest magnitude of each leaf, with their indices."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.combine.codec import Encoding, Leaves, gathered
from shardtrain.combine.combiner import Codec
from shardtrain.combine.group import Group


def top_k(share: float = 0.01) -> Codec:
    """Send the elements of greatest magnitude of each leaf; the other elements stay in the residual.

    A payload has 8 bytes per element sent and 4 for the count. All ranks gather all payloads, so each
    sends its own to P - 1 ranks: less than a float32 all-reduce while share < 1 / P. Of a sharded leaf
    each device sends elements of its shard.

    Args:
      share: fraction of a leaf's elements that is sent; at least one element is sent.

    Raises:
      ValueError: the share is not above 0 and at most 1.

    Source: Stich et al. 2018, Sparsified SGD with memory, algorithm 1; Lin et al. 2018, Deep gradient
    compression, section 3.1.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"top_k share is {share!r}; it must be above 0 and at most 1, such as 0.01")
    return gathered(Encoding(init=lambda leaves: (), encode=partial(_encode, share), decode=_decode))


def count_sent(share: float, size: int) -> int:
    """Return the number of elements of a leaf that are sent.

    >>> count_sent(0.01, 1000), count_sent(0.01, 3), count_sent(0.01, 0)
    (10, 1, 0)
    """
    return min(size, max(1, math.floor(share * size + 0.5)))


def _encode(share: float, leaves: Leaves, state: Any, group: Group) -> tuple[Any, Any]:
    payload = []
    for leaf in leaves:
        flat = leaf.reshape(-1)
        # a NaN counts as the greatest, so that it is sent
        magnitude = jnp.where(jnp.isnan(flat), jnp.inf, jnp.abs(flat))
        indices = lax.top_k(magnitude, count_sent(share, leaf.size))[1].astype(jnp.int32)
        payload.append((flat[indices], indices))
    return payload, state


def _decode(payload: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    return [
        jnp.zeros(math.prod(shape.shape)).at[indices].set(values, unique_indices=True).reshape(shape.shape)
        for (values, indices), shape in zip(payload, shapes, strict=True)
    ]
