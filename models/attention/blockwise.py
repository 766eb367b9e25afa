"""Attention in blocks of queries and keys, so that no array has a number for each query and key.

The backward pass computes the scores again. Causal blocks, and those outside a window, are left out.

References:
  Dao et al. 2022, FlashAttention, https://arxiv.org/abs/2205.14135, algorithms 1 and 4.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.models.attention.options import Attention, ScoreOptions
from shardtrain.models.attention.score_blocks import (
    HIDDEN,
    Keys,
    Queries,
    VisibleKeys,
    add_gradients,
    add_keys,
    finish_sums,
    group_heads,
    spread_mean,
    start_sums,
)

AT_ONCE = 256
"""Scores exist for so many queries and keys at a time."""


def count_block(length: int) -> int:
    """Return the number of positions of a block; blocks are equal, and the last one may be padded.

    >>> count_block(100), count_block(512), count_block(513)
    (100, 256, 171)
    """
    return -(-length // -(-length // AT_ONCE))


def label_keys(options: ScoreOptions) -> VisibleKeys:
    """Return the labels of queries and keys: their segments, or whether a mask shows a key."""
    mask = None if options.mask_BS is None else options.mask_BS != 0
    if options.segments_BT is None:
        return VisibleKeys(None, mask, options.window)
    labels = options.segments_BT.astype(jnp.int32)
    return VisibleKeys(labels, labels if mask is None else jnp.where(mask, labels, HIDDEN), options.window)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: VisibleKeys, distance: Any, soft_cap: float | None
) -> jax.Array:
    """Return attention, block by block; softmax in float32.

    Args:
      q: (B, kv_heads, group, T, K), scaled.
      k: (B, kv_heads, S, K).
      v: (B, kv_heads, S, K).
      seen: labels of queries and keys. A query that sees no key gets the mean of all values.
      distance: see `Queries`.
      soft_cap: see `Queries`.

    Returns:
      Shaped and typed as q.
    """
    return forward_blocks(q, k, v, seen, distance, soft_cap)[0]


def forward_blocks(
    q: Any, k: Any, v: Any, seen: VisibleKeys, distance: Any, soft_cap: float | None
) -> tuple[Any, Any]:
    """Return `attend_blocks`, and what its gradient needs: the arguments, the result and the log-sum-exp."""
    keys, size = _pad_keys(k, v, seen)
    mean = v.astype(jnp.float32).mean(-2)
    some, padded = _cut_queries(q, seen, distance, soft_cap)

    def visit(number: Any, found: Any) -> Any:
        queries = some(number)
        sums = add_keys(queries, keys, start_sums(queries.q), size)
        return _put_block(found, finish_sums(sums, mean), number)

    start = jnp.zeros(padded, q.dtype), jnp.zeros(padded[:-1], jnp.float32)
    out, logsumexp = lax.fori_loop(0, padded[-2] // count_block(q.shape[-2]), visit, start)
    out, logsumexp = out[..., : q.shape[-2], :], logsumexp[..., : q.shape[-2]]
    return out, (q, k, v, seen, distance, out, logsumexp)


def backward_blocks(soft_cap: float | None, kept: Any, cotangent: jax.Array) -> Any:
    """Return the gradients of the arguments of `attend_blocks`, from what `forward_blocks` kept."""
    q, k, v, seen, distance, out, logsumexp = kept
    of_out = cotangent.astype(jnp.float32)
    delta = (of_out * out.astype(jnp.float32)).sum(-1)
    keys, size = _pad_keys(k, v, seen)
    some, padded = _cut_queries(q, seen, distance, soft_cap)
    more, block = padded[-2] - q.shape[-2], count_block(q.shape[-2])
    # queries of padding have no weights
    whole = _pad(of_out, more, -2), _pad(delta, more, -1), _pad(logsumexp, more, -1, jnp.inf)

    def visit(number: Any, found: Any) -> Any:
        of_q, *of_keys = found
        queries, start = some(number), number * block
        some_out, some_delta, some_logsumexp = (
            lax.dynamic_slice_in_dim(x, start, block, axis)
            for x, axis in zip(whole, (-2, -1, -1), strict=True)
        )
        sums = jnp.zeros(queries.q.shape, jnp.float32), *of_keys
        of_some, *of_keys = add_gradients(queries, keys, some_out, some_delta, some_logsumexp, sums, size)
        return lax.dynamic_update_slice_in_dim(of_q, of_some.astype(q.dtype), start, -2), *of_keys

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in keys[:2])
    of_q, of_k, of_v = lax.fori_loop(0, padded[-2] // block, visit, (jnp.zeros(padded, q.dtype), *zeros))
    of_v += spread_mean(of_out, logsumexp, k.shape[-2])
    of_k, of_v = (x[..., : k.shape[-2], :].astype(k.dtype) for x in (of_k, of_v))
    return of_q[..., : q.shape[-2], :], of_k, of_v, None, None


attend_blocks.defvjp(forward_blocks, backward_blocks)


def _pad_keys(k: jax.Array, v: jax.Array, seen: VisibleKeys) -> tuple[Keys, int]:
    """Return keys that blocks divide, of which no query sees those of padding, and the size of a block."""
    size, labels = count_block(k.shape[-2]), seen.of_keys
    more = -k.shape[-2] % size
    if more and labels is None:
        labels = jnp.ones((k.shape[0], k.shape[-2]), bool)
    if labels is not None:
        labels = _pad(labels, more, 1, False if labels.dtype == bool else HIDDEN)
    return Keys(_pad(k, more, -2), _pad(v, more, -2), labels), size


def _cut_queries(q: jax.Array, seen: VisibleKeys, distance: Any, soft_cap: float | None) -> Any:
    """Return a function from the number of a block to its `Queries`, and the shape of the padded queries."""
    size, labels = count_block(q.shape[-2]), seen.of_queries
    more = -q.shape[-2] % size
    q = _pad(q, more, -2)
    labels = labels if labels is None else _pad(labels, more, 1)

    def some(number: Any) -> Queries:
        start = number * size
        own = labels if labels is None else lax.dynamic_slice_in_dim(labels, start, size, 1)
        some_q = lax.dynamic_slice_in_dim(q, start, size, -2)
        return Queries(some_q, own, None if distance is None else distance + start, seen.window, soft_cap)

    return some, q.shape


def _put_block(whole: Any, block: Any, number: Any) -> Any:
    """Write the context and sums of a block of queries."""
    out, logsumexp = block
    start = number * out.shape[-2]
    out = lax.dynamic_update_slice_in_dim(whole[0], out.astype(whole[0].dtype), start, -2)
    return out, lax.dynamic_update_slice_in_dim(whole[1], logsumexp, start, -1)


def _pad(x: jax.Array, more: int, axis: int, value: Any = 0) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths, constant_values=value) if more else x


def _find_obstacles(q_BTHK: Any, k_BSHK: Any, options: ScoreOptions, devices: Sequence[Any]) -> list[str]:
    found = ["no relative positions"] * (options.bias_BHTS is not None)
    of_query = options.mask_BS is not None and options.mask_BS.ndim == 3
    return found + ["a mask that is the same for all queries"] * of_query


def _attend(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, options: ScoreOptions) -> jax.Array:
    seen, distance = label_keys(options), jnp.int32(0) if options.causal else None

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_blocks(q, k, v, seen, distance, options.soft_cap)

    return group_heads(q_BTHK, k_BSHK, v_BSHK, attention)


BLOCKWISE = Attention(_find_obstacles, _attend)
