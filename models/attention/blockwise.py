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

    def visit(block: Any) -> Any:
        some, labels, start = block
        queries = Queries(some, labels, start, seen.window, soft_cap)
        out, logsumexp = finish_sums(add_keys(queries, keys, start_sums(queries.q), size), mean)
        return out.astype(q.dtype), logsumexp

    out, logsumexp = lax.map(visit, _stack_queries(q, seen, distance))
    out, logsumexp = _join(out, q.shape[-2], -2), _join(logsumexp, q.shape[-2], -1)
    return out, (q, k, v, seen, distance, out, logsumexp)


def backward_blocks(soft_cap: float | None, kept: Any, cotangent: jax.Array) -> Any:
    """Return the gradients of the arguments of `attend_blocks`, from what `forward_blocks` kept."""
    q, k, v, seen, distance, out, logsumexp = kept
    of_out = cotangent.astype(jnp.float32)
    delta = (of_out * out.astype(jnp.float32)).sum(-1)
    keys, size = _pad_keys(k, v, seen)

    def visit(of_keys: Any, block: Any) -> Any:
        (some, labels, start), some_out, some_delta, some_logsumexp = block
        queries = Queries(some, labels, start, seen.window, soft_cap)
        sums = jnp.zeros(queries.q.shape, jnp.float32), *of_keys
        of_q, *of_keys = add_gradients(queries, keys, some_out, some_delta, some_logsumexp, sums, size)
        return of_keys, of_q.astype(q.dtype)

    # queries of padding have no weights
    of_blocks = _stack(of_out, -2), _stack(delta, -1), _stack(logsumexp, -1, jnp.inf)
    zeros = [jnp.zeros(x.shape, jnp.float32) for x in keys[:2]]
    (of_k, of_v), of_q = lax.scan(visit, zeros, (_stack_queries(q, seen, distance), *of_blocks))
    of_v += spread_mean(of_out, logsumexp, k.shape[-2])
    of_k, of_v = (x[..., : k.shape[-2], :].astype(k.dtype) for x in (of_k, of_v))
    return _join(of_q, q.shape[-2], -2), of_k, of_v, None, None


attend_blocks.defvjp(forward_blocks, backward_blocks)


def _pad_keys(k: jax.Array, v: jax.Array, seen: VisibleKeys) -> tuple[Keys, int]:
    """Return keys that blocks divide, of which no query sees those of padding, and the size of a block."""
    size, labels = count_block(k.shape[-2]), seen.of_keys
    if k.shape[-2] % size and labels is None:
        labels = jnp.ones((k.shape[0], k.shape[-2]), bool)
    if labels is not None:
        labels = _pad(labels, 1, False if labels.dtype == bool else HIDDEN)
    return Keys(_pad(k, -2), _pad(v, -2), labels), size


def _stack_queries(q: jax.Array, seen: VisibleKeys, distance: Any) -> tuple[Any, Any, Any]:
    """Return the blocks of queries, of their labels, and their distances from the first key."""
    size = count_block(q.shape[-2])
    starts = jnp.arange(0, q.shape[-2], size, dtype=jnp.int32)
    labels = None if seen.of_queries is None else _stack(seen.of_queries, 1)
    return _stack(q, -2), labels, None if distance is None else distance + starts


def _pad(x: jax.Array, axis: int, value: Any = 0) -> jax.Array:
    """Pad positions to a multiple of their block."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % count_block(x.shape[axis]))
    return jnp.pad(x, widths, constant_values=value) if any(more for _, more in widths) else x


def _stack(x: jax.Array, axis: int, value: Any = 0) -> jax.Array:
    """Cut padded positions into blocks along a new leading dim."""
    size, x = count_block(x.shape[axis]), _pad(x, axis, value)
    return jnp.stack(jnp.split(x, x.shape[axis] // size, axis))


def _join(x: jax.Array, length: int, axis: int) -> jax.Array:
    """Join blocks, without their padding."""
    return lax.slice_in_dim(jnp.concatenate(list(x), axis), 0, length, axis=axis)


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
