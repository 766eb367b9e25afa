"""A codec that sends the greatest elements of each leaf, and where they stand."""

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
    """The elements of greatest magnitude of each leaf; the others wait in the residual.

    Every rank gathers all payloads of 8 bytes per chosen element and 4 for the count, so it sends
    that to P - 1 ranks: less than a float32 all-reduce while share < 1 / P. Of a sharded leaf each
    device chooses its share of its shard.

    Args:
      share: of the elements of a leaf, rounded; at least one element is sent.

    Raises:
      ValueError: the share is not above 0 and at most 1.

    Source: Stich et al. 2018, Sparsified SGD with memory, algorithm 1; Lin et al. 2018, Deep gradient
    compression, section 3.1.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"top_k share is {share!r}; it must be above 0 and at most 1, such as 0.01")
    return gathered(Encoding(init=lambda leaves: (), encode=partial(_encode, share), decode=_decode))


def chosen(share: float, size: int) -> int:
    """How many elements of a leaf are sent.

    >>> chosen(0.01, 1000), chosen(0.01, 3), chosen(0.01, 0)
    (10, 1, 0)
    """
    return min(size, max(1, math.floor(share * size + 0.5)))


def _encode(share: float, leaves: Leaves, kept: Any, group: Group) -> tuple[Any, Any]:
    payload = []
    for leaf in leaves:
        flat = leaf.reshape(-1)
        # a NaN is greater than anything
        magnitude = jnp.where(jnp.isnan(flat), jnp.inf, jnp.abs(flat))
        places = lax.top_k(magnitude, chosen(share, leaf.size))[1].astype(jnp.int32)
        payload.append((flat[places], places))
    return payload, kept


def _decode(payload: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    return [
        jnp.zeros(math.prod(shape.shape)).at[places].set(values, unique_indices=True).reshape(shape.shape)
        for (values, places), shape in zip(payload, shapes, strict=True)
    ]
