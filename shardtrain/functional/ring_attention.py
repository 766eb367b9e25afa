"""Compute the attention of one device of a ring: its queries to the keys and values of all devices.

Softmax is kept as running sums, so that memory does not grow with the ring; the backward pass sends keys
around the ring again. `context_attention.py` calls it. Next: `ring.py`, `score_blocks.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.functional.ring import Ring
from shardtrain.models.attention.blockwise import backward_blocks, forward_blocks
from shardtrain.models.attention.score_blocks import (
    Keys,
    Queries,
    VisibleKeys,
    add_gradients,
    add_keys,
    finish_sums,
    spread_mean,
    start_sums,
)

Pair = tuple[Any, Any, Any]
"""(part of the queries, part of the keys, `Queries.distance`)."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: VisibleKeys, ring: Ring) -> jax.Array:
    """Return the attention of this device's queries to the keys of all devices; softmax in float32.

    Args:
      q: (B, kv_heads, group, T, K), scaled.
      k: (B, kv_heads, S, K).
      v: (B, kv_heads, S, K).
      seen: labels of these queries and keys. A query that sees no key gets the mean of all values, as for
        equal scores; in the order "window" every query sees a key.
      ring: its devices. In the balanced order each device computes two of the four blocks of scores for
        every other device.

    Returns:
      Shaped and typed as q.

    References:
      Liu et al. 2023, Ring Attention, https://arxiv.org/abs/2310.01889, section 3.
    """
    return _forward(q, k, v, seen, ring)[0]


def _forward(q: Any, k: Any, v: Any, seen: VisibleKeys, ring: Ring) -> tuple[Any, Any]:
    queries, of_device = _split_queries(q, seen, ring), _split_keys(k, v, seen, ring)
    sums = start_sums(queries[0])
    mean, keys, before = jnp.zeros((*v.shape[:2], v.shape[3]), jnp.float32), of_device, None
    for step in range(ring.num_steps):
        keys = ring.next_keys(step, of_device, keys, before)
        before = sums
        mean += keys.v.astype(jnp.float32).sum((0, 3)) / (ring.num_steps * k.shape[2])
        for mine, theirs, distance in _list_pairs(step, ring, q.shape[3], seen.window):
            block = _select_block(queries, mine, distance, seen, ring)
            sums = _put(sums, mine, add_keys(block, _slice_at(keys, theirs), _slice_at(sums, mine)))
    out, logsumexp = jax.vmap(finish_sums, (0, None))(sums, mean)
    out = _join_whole(out).astype(q.dtype)
    return out, (q, k, v, seen, out, logsumexp)


def _backward(ring: Ring, kept: Any, cotangent: jax.Array) -> Any:
    q, k, v, seen, out, logsumexp = kept
    of_out = cotangent.astype(jnp.float32)
    delta = (of_out * out.astype(jnp.float32)).sum(-1)
    queries, of_device = _split_queries(q, seen, ring), _split_keys(k, v, seen, ring)
    of_out, delta, keys = _split_parts(of_out, ring, 3), _split_parts(delta, ring, 3), of_device
    of_queries = jnp.zeros(queries[0].shape, jnp.float32)
    of_mean = spread_mean(of_out, logsumexp, ring.num_steps * k.shape[2]).sum(0)
    # gradients of this device's own keys, and of those that visit, which travel with them in float32
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2])
    own, visiting = zeros, zeros
    before: Any = None
    for step in range(ring.num_steps):
        found = own if step == 0 else visiting
        found = found[0], found[1] + of_mean
        keys = ring.next_keys(step, of_device, keys, before)
        # `delta` is computed here alone: else a compiler keeps the first keys that the forward pass was sent
        before = of_queries, own, delta
        for mine, theirs, distance in _list_pairs(step, ring, q.shape[3], seen.window):
            block = _select_block(queries, mine, distance, seen, ring)
            sums = (of_queries[mine], *_slice_at(found, theirs))
            of_block = (of_out[mine], delta[mine], logsumexp[mine])
            of_q, *of_keys = add_gradients(block, _slice_at(keys, theirs), *of_block, sums)
            of_queries, found = of_queries.at[mine].set(of_q), _put(found, theirs, tuple(of_keys))
        if step == 0:
            own = found
        elif ring.is_tournament:
            home = ring.exchange_with_opponent(found, step)
            own = jax.tree.map(jnp.add, own, home)
        else:
            # with the keys, and home from the last step
            visiting = ring.send(found, 1 if step < ring.num_steps - 1 else -step)
    of_k, of_v = (_join_whole(a + b).astype(x.dtype) for a, b, x in zip(own, visiting, (k, v), strict=True))
    return _join_whole(of_queries).astype(q.dtype), of_k, of_v, None


ring_attention.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend_gathered(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: VisibleKeys,
    distance: Any,
    soft_cap: float | None,
    axis: str,
) -> jax.Array:
    """Compute attention like `attend_blocks`, after an all-gather of keys and values in each pass.

    Args:
      q, k, v: as for `ring_attention`, contiguous shards.
      seen: labels of these queries, and of the keys of all devices.
      distance: position of the first query of this device; None if attention is not causal.
      soft_cap: see `Queries`.
      axis: the mesh axis, which must be manual.
    """
    return _attend_gathered_forward(q, k, v, seen, distance, soft_cap, axis)[0]


def _attend_gathered_forward(
    q: Any, k: Any, v: Any, seen: VisibleKeys, distance: Any, soft_cap: Any, axis: str
) -> tuple[Any, Any]:
    all_k, all_v = _gather((k, v), axis)
    out, (*_, logsumexp) = forward_blocks(q, all_k, all_v, seen, distance, soft_cap)
    return out, (q, k, v, seen, distance, out, logsumexp)


def _attend_gathered_backward(soft_cap: float | None, axis: str, kept: Any, cotangent: jax.Array) -> Any:
    q, k, v, *rest = kept
    of_q, *of_keys, _, _ = backward_blocks(soft_cap, (q, *_gather((k, v), axis), *rest), cotangent)
    of_k, of_v = (lax.psum_scatter(x, axis, scatter_dimension=2, tiled=True) for x in of_keys)
    return of_q, of_k, of_v, None, None


attend_gathered.defvjp(_attend_gathered_forward, _attend_gathered_backward)


def _gather(arrays: Any, axis: str) -> Any:
    return jax.tree.map(lambda x: lax.all_gather(x, axis, axis=2, tiled=True), arrays)


def _list_pairs(step: int, ring: Ring, num_queries: int, window: Any) -> list[Pair]:
    """List the blocks of scores of a step, when the keys of `Ring.other` are here.

    Of a balanced ring each device has two parts, 0 early and 1 late. Its late queries see all early keys. Of
    a device before it, early queries see early keys too; of one behind it, late queries see late keys.
    """
    if ring.order == "any":
        return [(0, 0, None)]
    me = lax.axis_index(ring.axis)
    size, other = num_queries // 2, ring.other(step)
    if ring.order == "window":
        near = [(i, j) for i in (0, 1) for j in (0, 1) if 0 <= 2 * step + i - j <= ring.reach]
        return [(i, j, (2 * (me - other) + i - j) * size) for i, j in near]

    my_part, other_part = ring.early_part(me), ring.early_part(other)

    def distance(mine: Any, theirs: Any) -> Any:
        places = [
            jnp.where(jnp.equal(half, 0), part, 2 * ring.num - 1 - part)
            for half, part in ((mine, my_part), (theirs, other_part))
        ]
        return (places[0] - places[1]) * size

    if step == 0:
        pairs: list[Pair] = [(0, 0, 0), (1, 0, None), (1, 1, 0)]
    else:
        either = jnp.where(my_part > other_part, 0, 1)
        pairs = [(1, 0, None), (either, either, None)]
    # behind the diagonal every key is seen, but for a window
    if window is None:
        return pairs
    return [(mine, theirs, distance(mine, theirs)) for mine, theirs, _ in pairs]


def _select_block(queries: Any, mine: Any, distance: Any, seen: VisibleKeys, ring: Ring) -> Queries:
    q, labels = _slice_at(queries, mine)
    return Queries(q, labels, distance, seen.window, ring.soft_cap)


def _split_parts(x: Any, ring: Ring, axis: int) -> Any:
    """Split a dim into a leading dim of parts."""
    return None if x is None else jnp.stack(jnp.split(x, ring.num_parts, axis))


def _split_queries(q: jax.Array, seen: VisibleKeys, ring: Ring) -> tuple[Any, Any]:
    return _split_parts(q, ring, 3), _split_parts(seen.of_queries, ring, 1)


def _split_keys(k: jax.Array, v: jax.Array, seen: VisibleKeys, ring: Ring) -> Keys:
    return Keys(_split_parts(k, ring, 2), _split_parts(v, ring, 2), _split_parts(seen.of_keys, ring, 1))


def _join_whole(x: jax.Array) -> jax.Array:
    return jnp.concatenate(list(x), -2)


def _slice_at(arrays: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], arrays)


def _put(arrays: Any, index: Any, values: Any) -> Any:
    return jax.tree.map(lambda x, value: x.at[index].set(value), arrays, values)
