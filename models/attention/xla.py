"""Attention as two products and a softmax, whose scores of all queries and keys are in memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.models.attention.options import Attention, ScoreOptions


def _find_obstacles(q_BTHK: Any, k_BSHK: Any, options: ScoreOptions, devices: Sequence[Any]) -> list[str]:
    return ["no soft cap with relative positions"] * (None not in (options.soft_cap, options.bias_BHTS))


def _attend(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, options: ScoreOptions) -> jax.Array:
    seen = _find_seen(q_BTHK, k_BSHK, options)
    if options.soft_cap is not None:
        return _attend_capped(q_BTHK, k_BSHK, v_BSHK, options.causal, seen, options.soft_cap)
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BSHK,
        v_BSHK,
        bias=options.bias_BHTS,
        mask=seen,
        is_causal=options.causal,
        implementation="xla",
    )


def _find_seen(q_BTHK: jax.Array, k_BSHK: jax.Array, options: ScoreOptions) -> jax.Array | None:
    """Return a mask (B, 1, T, S) of visible keys, except for causal order; None shows all."""
    mask, segments, seen = options.mask_BS, options.segments_BT, None
    if mask is not None:
        seen = (mask if mask.ndim == 3 else mask[:, None])[:, None] != 0
    if segments is not None:
        seen = _combine_masks(segments[:, None, :, None] == segments[:, None, None, :], seen)
    if options.window is not None:
        query, key = jnp.arange(q_BTHK.shape[1])[:, None], jnp.arange(k_BSHK.shape[1])
        seen = _combine_masks((query - key < options.window)[None, None], seen)
    return seen


def _combine_masks(first: jax.Array, second: jax.Array | None) -> jax.Array:
    return first if second is None else first & second


def _attend_capped(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    causal: bool,
    seen: jax.Array | None,
    soft_cap: float,
) -> jax.Array:
    """Compute attention with float32 scores between -soft_cap and soft_cap; `seen` is a mask (B, 1, T, S).

    References:
      Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """
    # query heads next to the key head that they share: B T N G K, and N key heads
    q = q_BTHK.reshape(*q_BTHK.shape[:2], k_BSHK.shape[2], -1, q_BTHK.shape[3])
    scores = jnp.einsum("BTNGK,BSNK->BNGTS", q, k_BSHK, preferred_element_type=jnp.float32)
    scores = soft_cap * jnp.tanh(scores * (q.shape[-1] ** -0.5 / soft_cap))
    if causal:
        seen = _combine_masks(jnp.tri(q.shape[1], k_BSHK.shape[1], dtype=bool)[None, None], seen)
    if seen is not None:
        scores = jnp.where(seen[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSHK.dtype)
    return jnp.einsum("BNGTS,BSNK->BTNGK", weights, v_BSHK).reshape(q_BTHK.shape)


XLA = Attention(_find_obstacles, _attend)
