"""Attention of one device of a ring: its queries, and the keys and values of all devices as they come round.

Softmax is kept as running sums, so that memory does not grow with the ring, and the backward pass goes round
once more. Next: `context_attention.py`, which calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

KEYS_AT_ONCE = 1024
"""Scores exist for this many keys at a time."""

Causal = Literal["no", "balanced", "gathered"]
"""Whether queries see keys up to their own position only: "balanced" in the order of `balanced_exchange`,
"gathered" where every device has the keys of all, in order."""


@dataclass(frozen=True)
class Ring:
    """The devices of a ring, and the order of what they have.

    Args:
      axis: the mesh axis, manual where attention is computed.
      num: devices of it; 1 where each has the keys of all.
      causal: see `Causal`.
    """

    axis: str
    num: int
    causal: Causal


Pair = tuple[Any, Any, Any]
"""(part of the queries, part of the keys, the key that the first query is at; None: they see all keys)."""


def balanced_exchange(x: jax.Array, axis: str, num: int, *, inverse: bool = False) -> jax.Array:
    """Exchange halves of contiguous shards so that device i has the parts i and 2 num - 1 - i of a sequence.

    Args:
      x: (B, T, ...) of each device; T is even.
      axis: the mesh axis, manual here.
      num: devices of it.
      inverse: from that order back to contiguous shards.

    Returns:
      The same shape, in rising order of positions.

    References:
      Brandon et al. 2023, Striped Attention, https://arxiv.org/abs/2311.09431, section 3, on the imbalance of
      causal rings; the order of two parts for each device is that of Megatron-LM's context parallelism.
    """
    owner = [part if part < num else 2 * num - 1 - part for part in range(2 * num)]
    pairs = [[(part // 2, owner[part]) for part in range(start, 2 * num, 2)] for start in (0, 1)]
    # device i gets the part i and another one; the first is the one with an even number where i is even
    is_even = lax.axis_index(axis) % 2 == 0
    halves = jnp.split(x, 2, 1)
    if inverse:
        low, high = halves
        sent = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
        back = [[(to, origin) for origin, to in found] for found in pairs]
        return jnp.concatenate([lax.ppermute(s, axis, p) for s, p in zip(sent, back, strict=True)], 1)
    even, odd = (lax.ppermute(half, axis, p) for half, p in zip(halves, pairs, strict=True))
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], 1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, ring: Ring) -> jax.Array:
    """Return the attention of this device's queries to the keys of all devices; softmax in float32.

    Args:
      q: (B, T, kv_heads, group, K), scaled.
      k: (B, S, kv_heads, K).
      v: (B, S, kv_heads, K).
      mask: bool (B, S), the keys that are seen. A query that sees none gets the mean of all values, as of
        equal scores.
      ring: its devices. In a balanced order, of every pair of devices two of four blocks of scores are
        computed, on all alike.

    Returns:
      Shaped and typed as q.

    References:
      Liu et al. 2023, Ring Attention, https://arxiv.org/abs/2310.01889, section 3.
    """
    return _forward(q, k, v, mask, ring)[0]


def _forward(q: Any, k: Any, v: Any, mask: Any, ring: Ring) -> tuple[Any, Any]:
    causal = ring.causal
    queries = _parts(q, causal)
    shape = queries.shape[:-1]
    sums = (
        jnp.zeros(queries.shape, jnp.float32),
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )

    def visit(sums: Any, keys: Any, pair: Pair) -> Any:
        mine, theirs, first = pair
        found = _add_keys(queries[mine], _at(keys, theirs), _at(sums, mine), first)
        return _put(sums, mine, found)

    keys = tuple(_parts(x, causal) for x in (k, v, mask))
    sum_of_values = jnp.zeros((v.shape[0], *v.shape[2:]), jnp.float32)
    for step in range(ring.num):
        keys = keys if step == 0 else _sent(keys, ring)
        sum_of_values += keys[1].astype(jnp.float32).sum((0, 2))
        for pair in _pairs(step, ring, q.shape[1]):
            sums = visit(sums, keys, pair)
    out, highest, total = sums
    sees_none = total == 0
    mean = sum_of_values[:, None, :, None] / (ring.num * k.shape[1])
    out = jnp.where(sees_none[..., None], mean, out / jnp.where(sees_none, 1, total)[..., None])
    out = _whole(out, causal).astype(q.dtype)
    # infinite, so that the weights of all keys are 0 in the backward pass
    logsumexp = jnp.where(sees_none, jnp.inf, highest + jnp.log(total))
    return out, (q, k, v, mask, out, logsumexp)


def _backward(ring: Ring, kept: Any, cotangent: jax.Array) -> Any:
    causal = ring.causal
    q, k, v, mask, out, logsumexp = kept
    queries, of_out = _parts(q, causal), _parts(cotangent.astype(jnp.float32), causal)
    delta = _parts((cotangent.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1), causal)
    keys = tuple(_parts(x, causal) for x in (k, v, mask))
    of_queries = jnp.zeros(queries.shape, jnp.float32)
    # of each value, by the queries that have the mean of all
    of_mean = jnp.where(jnp.isposinf(logsumexp)[..., None], of_out, 0).sum((0, 2, 4))
    of_mean = of_mean[:, None] / (ring.num * k.shape[1])
    # gradients of this device's own keys, and of those that visit, which travel with them in float32
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2])
    own, visiting = zeros, zeros
    for step in range(ring.num):
        found = own if step == 0 else visiting
        found = found[0], found[1] + of_mean
        keys = keys if step == 0 else _sent(keys, ring)
        for mine, theirs, first in _pairs(step, ring, q.shape[1]):
            of_q, *of_keys = _key_gradients(
                queries[mine], _at(keys, theirs), of_out[mine], delta[mine], logsumexp[mine], first
            )
            of_queries = of_queries.at[mine].add(of_q)
            found = tuple(x.at[theirs].add(more) for x, more in zip(found, of_keys, strict=True))
        own, visiting = (found, visiting) if step == 0 else (own, _sent(found, ring))
    of_k, of_v = (
        _whole(a + b, causal).astype(x.dtype) for a, b, x in zip(own, visiting, (k, v), strict=True)
    )
    return _whole(of_queries, causal).astype(q.dtype), of_k, of_v, None


ring_attention.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def gathered_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, axis: str, causal: bool
) -> jax.Array:
    """Return the same from all keys and values, gathered, and gathered again in the backward pass.

    Args:
      q, k, v: as for `ring_attention`, contiguous shards.
      mask: bool (B, S of all devices).
      axis: the mesh axis, manual here.
      causal: queries see keys of positions up to their own.
    """
    return _gathered_forward(q, k, v, mask, axis, causal)[0]


def _gathered_forward(q: Any, k: Any, v: Any, mask: Any, axis: str, causal: bool) -> tuple[Any, Any]:
    all_k, all_v = _gathered((k, v), axis)
    out, (*_, logsumexp) = _forward(q, all_k, all_v, mask, _alone(axis, causal))
    return out, (q, k, v, mask, out, logsumexp)


def _gathered_backward(axis: str, causal: bool, kept: Any, cotangent: jax.Array) -> Any:
    q, k, v, *rest = kept
    of_q, of_k, of_v, _ = _backward(_alone(axis, causal), (q, *_gathered((k, v), axis), *rest), cotangent)
    of_k, of_v = (lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) for x in (of_k, of_v))
    return of_q, of_k, of_v, None


gathered_attention.defvjp(_gathered_forward, _gathered_backward)


def _alone(axis: str, causal: bool) -> Ring:
    return Ring(axis, 1, "gathered" if causal else "no")


def _gathered(arrays: Any, axis: str) -> Any:
    return jax.tree.map(lambda x: lax.all_gather(x, axis, axis=1, tiled=True), arrays)


def _pairs(step: int, ring: Ring, num_queries: int) -> list[Pair]:
    """List the blocks of scores of a step, when the keys of the device `step` places before are here.

    Of a balanced ring each device has two parts, 0 early and 1 late. Its late queries see all early keys. Of
    a device before it, early queries see early keys too; of one behind it, late queries see late keys.
    """
    if ring.causal == "no":
        return [(0, 0, None)]
    if ring.causal == "gathered":
        return [(0, 0, lax.axis_index(ring.axis) * num_queries)]
    if step == 0:
        return [(0, 0, 0), (1, 0, None), (1, 1, 0)]
    either = jnp.where(lax.axis_index(ring.axis) >= step, 0, 1)
    return [(1, 0, None), (either, either, None)]


def _parts(x: jax.Array, causal: Causal) -> jax.Array:
    """Split dim 1 into a leading dim of parts: two of a balanced ring, else one."""
    return jnp.stack(jnp.split(x, 2 if causal == "balanced" else 1, 1))


def _whole(x: jax.Array, causal: Causal) -> jax.Array:
    return jnp.concatenate([x[0], x[1]], 1) if causal == "balanced" else x[0]


def _sent(arrays: Any, ring: Ring) -> Any:
    """Send arrays to the next device of the ring."""
    pairs = [(i, (i + 1) % ring.num) for i in range(ring.num)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axis, pairs), arrays)


def _at(arrays: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], arrays)


def _put(arrays: Any, index: Any, values: Any) -> Any:
    return jax.tree.map(lambda x, value: x.at[index].set(value), arrays, values)


def _scores(q: Any, k: Any, mask: Any, start: Any, first: Any) -> jax.Array:
    """Return float32 scores (B, T, kv_heads, group, S), -inf where a key is not seen."""
    scores = jnp.einsum("BTHGK,BSHK->BTHGS", q, k, preferred_element_type=jnp.float32)
    seen = mask[:, None, None, None, :]
    if first is not None:
        query = first + jnp.arange(q.shape[1])[:, None]
        seen = seen & (query >= start + jnp.arange(k.shape[1]))[None, :, None, None, :]
    return jnp.where(seen, scores, -jnp.inf)


def _over_keys(visit: Callable[..., Any], carry: Any, keys: Any) -> tuple[Any, Any]:
    """Scan visit(carry, (keys, values, mask, first position)) over blocks of keys."""
    num_keys = keys[0].shape[1]
    num_blocks = next(n for n in range(-(-num_keys // KEYS_AT_ONCE), num_keys + 1) if num_keys % n == 0)
    size = num_keys // num_blocks
    if num_blocks == 1:
        return visit(carry, (*keys, 0))
    blocks = [jnp.moveaxis(x.reshape(x.shape[0], num_blocks, size, *x.shape[2:]), 1, 0) for x in keys]
    carry, found = lax.scan(visit, carry, (*blocks, size * jnp.arange(num_blocks)))

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    return carry, jax.tree.map(joined, found)


def _add_keys(q: Any, keys: Any, sums: Any, first: Any) -> Any:
    """Add keys and values to the sums of a softmax: weighted values, highest score, sum of exponentials."""

    def visit(sums: Any, block: Any) -> tuple[Any, None]:
        k, v, mask, start = block
        out, highest, total = sums
        scores = _scores(q, k, mask, start, first)
        new = jnp.maximum(highest, scores.max(-1))
        # before a first key is seen there is nothing to subtract
        safe = jnp.where(jnp.isneginf(new), 0, new)
        weights = jnp.exp(scores - safe[..., None])
        kept = jnp.exp(highest - safe)
        more = jnp.einsum("BTHGS,BSHK->BTHGK", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (out * kept[..., None] + more, new, total * kept + weights.sum(-1)), None

    return _over_keys(visit, sums, keys)[0]


def _key_gradients(
    q: Any, keys: Any, of_out: Any, delta: Any, logsumexp: Any, first: Any
) -> tuple[Any, Any, Any]:
    """Return the gradients of queries, keys and values from one block of scores, float32."""

    def visit(of_q: Any, block: Any) -> tuple[Any, Any]:
        k, v, mask, start = block
        weights = jnp.exp(_scores(q, k, mask, start, first) - logsumexp[..., None])
        of_v = jnp.einsum("BTHGS,BTHGK->BSHK", weights, of_out)
        of_weights = jnp.einsum("BTHGK,BSHK->BTHGS", of_out, v.astype(jnp.float32))
        of_scores = weights * (of_weights - delta[..., None])
        of_q += jnp.einsum("BTHGS,BSHK->BTHGK", of_scores, k.astype(jnp.float32))
        return of_q, (jnp.einsum("BTHGS,BTHGK->BSHK", of_scores, q.astype(jnp.float32)), of_v)

    of_q, (of_k, of_v) = _over_keys(visit, jnp.zeros(q.shape, jnp.float32), keys)
    return of_q, of_k, of_v
