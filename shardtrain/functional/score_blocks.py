"""Attention of some queries to some keys: what a block of scores adds to a softmax, and its gradients.

`ring_attention.py` decides which blocks a device computes.
"""

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.functional.score_sizes import KEYS_AT_ONCE, num_key_blocks

HIDDEN = int(jnp.iinfo(jnp.int32).min)
"""The label of a key that no query sees."""


class Queries(NamedTuple):
    """Queries of a block of scores, and which keys they see.

    Args:
      q: (B, T, kv_heads, group, K), scaled.
      labels: int32 (B, T); a query sees keys of its own label. None: those whose label is True.
      distance: position of the first query less that of the first key, int; then a query sees keys up to
        its own position. None: positions do not matter.
      window: how many keys a query sees at most, its own and those just before it. None: any number.
      soft_cap: scores x become soft_cap * tanh(x / soft_cap). None: they stay.
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
      labels: int32 or bool (B, S), see `Queries`. None: all keys are seen.
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
        scores, seen = _scores(queries, keys, start)
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
    """Add the gradients of queries, keys and values from one block of scores.

    Added to what is there already, as zeros of each block would all be there from the start of a program.

    Args:
      queries: see there.
      keys: see there.
      of_out: the gradient of what the queries get, float32 (B, T, kv_heads, group, K).
      delta: its product with that, summed over K.
      logsumexp: of all scores of a query, float32 (B, T, kv_heads, group).
      sums: the gradients so far, float32, shaped as queries, keys and values.

    Returns:
      The new sums.
    """

    def visit(sums: Any, keys: Keys, start: Any) -> Any:
        of_q, of_k, of_v = sums
        scores, seen = _scores(queries, keys, start)
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
    """Add to some of the keys from a number on."""
    before = lax.dynamic_slice_in_dim(x, start, more.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(x, before + more, start, 1)


def _scores(queries: Queries, keys: Keys, start: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return float32 scores (B, T, kv_heads, group, S), and which are seen; None: all.

    Args:
      queries: see there.
      keys: some of the block.
      start: the number of the first of them in the block.
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
    """Go through blocks of the keys by sums = visit(sums, some keys, the number of the first)."""
    num_keys = keys.k.shape[1]
    num_blocks = num_key_blocks(num_keys, KEYS_AT_ONCE)
    size = num_keys // num_blocks
    if num_blocks == 1:
        return visit(sums, keys, 0)

    # keys are sliced where they are: stacked blocks would be a copy of them for each loop. And a while loop,
    # since of a scan jax takes what depends on positions alone, the masks, and keeps those of all blocks
    def block(state: Any) -> Any:
        number, sums = state
        start = number * size
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, 1), keys)
        return number + 1, visit(sums, some, start)

    return lax.while_loop(lambda state: state[0] < num_blocks, block, (jnp.int32(0), sums))[1]
