"""Compute the softmax sums and the gradients of one block of attention scores.

`blockwise.py` computes whole sequences by them, `functional/ring_attention.py` those of a ring of devices.
"""

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

KEYS_AT_ONCE = 1024
"""Scores exist for this many keys at a time."""

LOOPED_KEYS = 256
"""From this many keys on a loop computes at least two blocks: compilers give the scores of each step of a
ring memory of their own, but reuse the memory of loops."""

LEAST_KEYS = 32
"""Keys that fit one block stay in one if the blocks of a loop would be smaller than this."""

HIDDEN = int(jnp.iinfo(jnp.int32).min)
"""The label of a key that no query sees."""


class VisibleKeys(NamedTuple):
    """Labels that decide, in addition to causal order, which keys a query sees.

    Args:
      of_queries: int32 labels (B, T); a query sees keys of its own label. None shows keys whose label is
        True.
      of_keys: int32 or bool labels (B, S). None shows all keys.
      window: largest number of keys that a causal query sees, its own and those just before it, an int
        scalar. None disables it.
    """

    of_queries: Any = None
    of_keys: Any = None
    window: Any = None


class Queries(NamedTuple):
    """Queries of a block of scores, and which keys they see.

    Args:
      q: (B, kv_heads, group, T, K), scaled.
      labels: (B, T), see `VisibleKeys`.
      distance: position of the first query minus that of the first key, int; a query sees keys up to its own
        position. None ignores positions.
      window: see `VisibleKeys`.
      soft_cap: scores x become soft_cap * tanh(x / soft_cap). None disables it.
    """

    q: jax.Array
    labels: jax.Array | None
    distance: Any
    window: Any
    soft_cap: float | None


class Keys(NamedTuple):
    """Keys of a block of scores.

    Args:
      k: (B, kv_heads, S, K).
      v: (B, kv_heads, S, K).
      labels: (B, S), see `VisibleKeys`.
    """

    k: jax.Array
    v: jax.Array
    labels: jax.Array | None


Grouped = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(queries as in `Queries`, keys and values as in `Keys`) -> the context, shaped and typed as the queries."""


def group_heads(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, attention: Grouped) -> jax.Array:
    """Call an attention with queries grouped by the key head that they share, and scaled."""
    dtype, heads = q_BTHK.dtype, k_BSHK.shape[2]
    if dtype == jnp.float16:
        # not every device has products of float16 that add up in float32
        q_BTHK, k_BSHK, v_BSHK = (x.astype(jnp.float32) for x in (q_BTHK, k_BSHK, v_BSHK))
    scale = jnp.asarray(q_BTHK.shape[3] ** -0.5, q_BTHK.dtype)
    q = (q_BTHK * scale).reshape(*q_BTHK.shape[:2], heads, -1, q_BTHK.shape[3])
    # heads before positions, so that products of a block transpose nothing
    out = attention(q.transpose(0, 2, 3, 1, 4), k_BSHK.swapaxes(1, 2), v_BSHK.swapaxes(1, 2))
    return out.transpose(0, 3, 1, 2, 4).reshape(q_BTHK.shape).astype(dtype)


def start_sums(q: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sums of a softmax before the first key: weighted values, highest scores, sums of weights."""
    shape = q.shape[:-1]
    return (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def finish_sums(sums: Any, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the context of queries in float32, and the log-sum-exp of all scores of each.

    Args:
      sums: see `add_keys`.
      mean: mean of all values, (B, kv_heads, K), which a query that sees no key gets, as for equal scores.
    """
    out, highest, total = sums
    sees_none = total == 0
    out /= jnp.where(sees_none, 1, total)[..., None]
    # infinite, so that the weights of all keys are 0 in the backward pass
    logsumexp = jnp.where(sees_none, jnp.inf, highest + jnp.log(total))
    return jnp.where(sees_none[..., None], mean[:, :, None, None], out), logsumexp


def spread_mean(of_out: jax.Array, logsumexp: jax.Array, num_keys: int) -> jax.Array:
    """Return the gradient of each value, (B, kv_heads, 1, K), by the queries that have the mean of all."""
    of_mean = jnp.where(jnp.isposinf(logsumexp)[..., None], of_out, 0).sum((-3, -2))
    return of_mean[..., None, :] / num_keys


def add_keys(queries: Queries, keys: Keys, sums: Any, size: int | None = None) -> Any:
    """Add keys and values to the sums of a softmax.

    Args:
      queries: see there.
      keys: see there.
      sums: float32 weighted values (B, kv_heads, group, T, K), highest scores and sums of exponentials
        (B, kv_heads, group, T).
      size: number of keys whose scores exist at a time, which divides that of the keys. None means as many as
        `num_key_blocks` says.

    Returns:
      The new sums.
    """

    def visit(sums: Any, keys: Keys, start: Any) -> Any:
        out, highest, total = sums
        scores, seen = _compute_scores(queries, keys, start)
        scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(highest, scores.max(-1))
        # before a first key is seen there is nothing to subtract
        safe = jnp.where(jnp.isneginf(new), 0, new)
        weights = jnp.exp(scores - safe[..., None])
        kept = jnp.exp(highest - safe)
        more = jnp.einsum(
            "BHGTS,BHSK->BHGTK", weights.astype(keys.v.dtype), keys.v, preferred_element_type=jnp.float32
        )
        return out * kept[..., None] + more, new, total * kept + weights.sum(-1)

    return _visit_keys(visit, sums, queries, keys, size)


def add_gradients(
    queries: Queries,
    keys: Keys,
    of_out: jax.Array,
    delta: jax.Array,
    logsumexp: jax.Array,
    sums: Any,
    size: int | None = None,
) -> tuple[Any, Any, Any]:
    """Add the gradients of one block of scores to those of queries, keys and values.

    Args:
      queries: see there.
      keys: see there.
      of_out: the gradient of the attention output, float32 (B, kv_heads, group, T, K).
      delta: the product of the output and its gradient, summed over K.
      logsumexp: log-sum-exp of all scores of a query, float32 (B, kv_heads, group, T).
      sums: the gradients so far, float32, shaped as queries, keys and values.
      size: see `add_keys`.

    Returns:
      The new sums.
    """

    def visit(sums: Any, keys: Keys, start: Any) -> Any:
        of_q, of_k, of_v = sums
        scores, seen = _compute_scores(queries, keys, start)
        weights = jnp.exp(
            (scores if seen is None else jnp.where(seen, scores, -jnp.inf)) - logsumexp[..., None]
        )
        of_v = _add(of_v, jnp.einsum("BHGTS,BHGTK->BHSK", weights, of_out), start)
        of_weights = jnp.einsum("BHGTK,BHSK->BHGTS", of_out, keys.v.astype(jnp.float32))
        of_scores = weights * (of_weights - delta[..., None])
        if queries.soft_cap is not None:
            of_scores *= 1 - jnp.square(scores / queries.soft_cap)
        of_q += jnp.einsum("BHGTS,BHSK->BHGTK", of_scores, keys.k.astype(jnp.float32))
        more = jnp.einsum("BHGTS,BHGTK->BHSK", of_scores, queries.q.astype(jnp.float32))
        return of_q, _add(of_k, more, start), of_v

    return _visit_keys(visit, sums, queries, keys, size)


def _add(x: jax.Array, more: jax.Array, start: Any) -> jax.Array:
    """Add to the keys from a start index on."""
    before = lax.dynamic_slice_in_dim(x, start, more.shape[-2], -2)
    return lax.dynamic_update_slice_in_dim(x, before + more, start, -2)


def _compute_scores(queries: Queries, keys: Keys, start: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return float32 scores (B, kv_heads, group, T, S), and a mask of the visible ones; None shows all.

    Args:
      queries: see there.
      keys: some keys of the block.
      start: the index of the first of them in the block.
    """
    scores = jnp.einsum("BHGTK,BHSK->BHGTS", queries.q, keys.k, preferred_element_type=jnp.float32)
    if queries.soft_cap is not None:
        scores = queries.soft_cap * jnp.tanh(scores / queries.soft_cap)
    seen = []
    if queries.labels is not None and keys.labels is not None:
        seen.append(queries.labels[:, :, None] == keys.labels[:, None, :])
    elif keys.labels is not None:
        seen.append(keys.labels[:, None, :])
    if queries.distance is not None:
        behind = (
            queries.distance + jnp.arange(scores.shape[-2])[:, None] - start - jnp.arange(scores.shape[-1])
        )
        seen.append((behind >= 0)[None])
        if queries.window is not None:
            seen.append((behind < queries.window)[None])
    return scores, reduce(and_, seen)[:, None, None] if seen else None


def _visit_keys(visit: Callable[..., Any], sums: Any, queries: Queries, keys: Keys, size: int | None) -> Any:
    """Update sums = visit(sums, keys, index of the first key) for each block of keys that a query sees."""
    num_keys = keys.k.shape[-2]
    size = num_keys // num_key_blocks(num_keys) if size is None else size
    if size == num_keys:
        return visit(sums, keys, 0)

    # slice keys in place: stacked blocks would copy them for each loop. A while loop, because jax moves the
    # masks, which depend on positions only, out of a scan, and keeps those of all blocks
    def block(state: Any) -> Any:
        number, sums = state
        start = number * size
        labels = keys.labels if keys.labels is None else lax.dynamic_slice_in_dim(keys.labels, start, size, 1)
        k, v = (lax.dynamic_slice_in_dim(x, start, size, -2) for x in (keys.k, keys.v))
        return number + 1, visit(sums, Keys(k, v, labels), start)

    first, end = find_visible_blocks(queries.distance, queries.q.shape[-2], num_keys, size, queries.window)
    return lax.while_loop(lambda state: state[0] < end, block, (jnp.int32(first), sums))[1]


def find_visible_blocks(
    distance: Any, num_queries: int, num_keys: int, size: int, window: Any = None
) -> tuple[Any, Any]:
    """Return the first block of keys that some query sees by its position, and the end of these blocks.

    Args:
      distance, window: see `Queries`.
      num_queries, num_keys: numbers of queries and keys.
      size: keys of a block, which divides their number.

    >>> find_visible_blocks(8, 4, 16, 4), find_visible_blocks(8, 4, 16, 4, window=4)
    ((0, 3), (1, 3))
    """
    if distance is None:
        return 0, num_keys // size
    end = (distance + num_queries - 1) // size + 1
    first = 0 if window is None else (distance - window + 1) // size
    if isinstance(end, int) and isinstance(first, int):
        return max(first, 0), min(end, num_keys // size)
    return jnp.maximum(first, 0), jnp.minimum(end, num_keys // size)


def num_key_blocks(num_keys: int, at_once: int = KEYS_AT_ONCE) -> int:
    """Return the number of equal blocks of keys; the scores of one block exist at a time.

    >>> num_key_blocks(128), num_key_blocks(1024), num_key_blocks(1025), num_key_blocks(4096)
    (1, 2, 5, 4)

    A loop over a few keys at a time takes longer than the memory that it saves is worth:

    >>> num_key_blocks(257), num_key_blocks(301)
    (1, 7)
    """
    least = max(-(-num_keys // at_once), 2 if num_keys >= LOOPED_KEYS else 1)
    found = next(n for n in range(least, num_keys + 1) if num_keys % n == 0)
    return 1 if num_keys <= at_once and num_keys // found < LEAST_KEYS else found


def window_reach(num: int, num_queries: int, window: int) -> int | None:
    """Return how many half shards before its own a query of a contiguous ring sees at most.

    Args:
      num: devices of the ring.
      num_queries: of a device, even.
      window: how many keys a query sees at most, its own and those just before it.

    Returns:
      None where a balanced ring computes less.

    >>> window_reach(4, 8, window=5), window_reach(4, 8, window=21)
    (1, None)
    """
    # the first query of a part, d parts behind, is (d - 1) * size + 1 places from the nearest key
    reach = min(2 * num - 1, 1 + (window - 2) // (num_queries // 2)) if window > 1 else 0
    # of each two parts of queries, reach + 1 of keys; the balanced ring computes 2 num + 1 of these blocks
    return reach if 2 * (reach + 1) < 2 * num + 1 else None
