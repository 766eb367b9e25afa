"""Compute the softmax sums and the gradients of one block of attention scores.

`ring_attention.py` decides which blocks a device computes.
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


class Queries(NamedTuple):
    """Queries of a block of scores, and which keys they see.

    Args:
      q: (B, T, kv_heads, group, K), scaled.
      labels: int32 (B, T); a query sees keys of its own label. None shows keys whose label is True.
      distance: position of the first query minus that of the first key, int; a query sees keys up to its own
        position. None ignores positions.
      window: largest number of keys that a query sees, its own and those just before it. None disables it.
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
      k: (B, S, kv_heads, K).
      v: (B, S, kv_heads, K).
      labels: int32 or bool (B, S), see `Queries`. None shows all keys.
    """

    k: jax.Array
    v: jax.Array
    labels: jax.Array | None


def add_keys(queries: Queries, keys: Keys, sums: Any) -> Any:
    """Add keys and values to the sums of a softmax.

    Args:
      queries: see there.
      keys: see there.
      sums: float32 weighted values (B, T, kv_heads, group, K), highest scores and sums of exponentials
        (B, T, kv_heads, group).

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
            "BTHGS,BSHK->BTHGK", weights.astype(keys.v.dtype), keys.v, preferred_element_type=jnp.float32
        )
        return out * kept[..., None] + more, new, total * kept + weights.sum(-1)

    return _visit_keys(visit, sums, keys)


def add_gradients(
    queries: Queries, keys: Keys, of_out: jax.Array, delta: jax.Array, logsumexp: jax.Array, sums: Any
) -> tuple[Any, Any, Any]:
    """Add the gradients of one block of scores to those of queries, keys and values.

    Args:
      queries: see there.
      keys: see there.
      of_out: the gradient of the attention output, float32 (B, T, kv_heads, group, K).
      delta: the product of the output and its gradient, summed over K.
      logsumexp: log-sum-exp of all scores of a query, float32 (B, T, kv_heads, group).
      sums: the gradients so far, float32, shaped as queries, keys and values.

    Returns:
      The new sums.
    """

    def visit(sums: Any, keys: Keys, start: Any) -> Any:
        of_q, of_k, of_v = sums
        scores, seen = _compute_scores(queries, keys, start)
        weights = jnp.exp(
            (scores if seen is None else jnp.where(seen, scores, -jnp.inf)) - logsumexp[..., None]
        )
        of_v = _add(of_v, jnp.einsum("BTHGS,BTHGK->BSHK", weights, of_out), start)
        of_weights = jnp.einsum("BTHGK,BSHK->BTHGS", of_out, keys.v.astype(jnp.float32))
        of_scores = weights * (of_weights - delta[..., None])
        if queries.soft_cap is not None:
            of_scores *= 1 - jnp.square(scores / queries.soft_cap)
        of_q += jnp.einsum("BTHGS,BSHK->BTHGK", of_scores, keys.k.astype(jnp.float32))
        more = jnp.einsum("BTHGS,BTHGK->BSHK", of_scores, queries.q.astype(jnp.float32))
        return of_q, _add(of_k, more, start), of_v

    return _visit_keys(visit, sums, keys)


def _add(x: jax.Array, more: jax.Array, start: Any) -> jax.Array:
    """Add to the keys from a start index on."""
    before = lax.dynamic_slice_in_dim(x, start, more.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(x, before + more, start, 1)


def _compute_scores(queries: Queries, keys: Keys, start: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return float32 scores (B, T, kv_heads, group, S), and a mask of the visible ones; None shows all.

    Args:
      queries: see there.
      keys: some keys of the block.
      start: the index of the first of them in the block.
    """
    scores = jnp.einsum("BTHGK,BSHK->BTHGS", queries.q, keys.k, preferred_element_type=jnp.float32)
    if queries.soft_cap is not None:
        scores = queries.soft_cap * jnp.tanh(scores / queries.soft_cap)
    seen = []
    if queries.labels is not None and keys.labels is not None:
        seen.append(queries.labels[:, :, None] == keys.labels[:, None, :])
    elif keys.labels is not None:
        seen.append(keys.labels[:, None, :])
    if queries.distance is not None:
        behind = (
            queries.distance + jnp.arange(scores.shape[1])[:, None] - start - jnp.arange(scores.shape[-1])
        )
        seen.append((behind >= 0)[None])
        if queries.window is not None:
            seen.append((behind < queries.window)[None])
    return scores, reduce(and_, seen)[:, :, None, None, :] if seen else None


def _visit_keys(visit: Callable[..., Any], sums: Any, keys: Keys) -> Any:
    """Update sums = visit(sums, keys, index of the first key) for each block of the keys."""
    num_keys = keys.k.shape[1]
    num_blocks = num_key_blocks(num_keys, KEYS_AT_ONCE)
    size = num_keys // num_blocks
    if num_blocks == 1:
        return visit(sums, keys, 0)

    # slice keys in place: stacked blocks would copy them for each loop. A while loop, because jax moves the
    # masks, which depend on positions only, out of a scan, and keeps those of all blocks
    def block(state: Any) -> Any:
        number, sums = state
        start = number * size
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, 1), keys)
        return number + 1, visit(sums, some, start)

    return lax.while_loop(lambda state: state[0] < num_blocks, block, (jnp.int32(0), sums))[1]


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
