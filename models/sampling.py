"""Draw the next token from logits: the likeliest token, or a random one of the likely tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardtrain.errors.options import CheckedOptions


@dataclass(frozen=True, kw_only=True)
class Sampling(CheckedOptions):
    """How the next token is drawn.

    Args:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: number of likeliest tokens to draw from. None means all tokens.
      top_p: draws from the smallest set of likeliest tokens that has this total probability; it is applied
        after `top_k`, to the probabilities of the remaining tokens.

    Raises:
      ValueError: listing every value that is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def list_problems(self) -> list[str]:
        """List the values that are out of range."""
        problems = []
        if self.temperature < 0:
            problems.append(
                f"temperature is {self.temperature}; it must be 0 or above. Use temperature=0.0 for the"
                " likeliest token."
            )
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k is {self.top_k}; it must be at least 1. Use top_k=None for all tokens.")
        if not 0 < self.top_p <= 1:
            problems.append(
                f"top_p is {self.top_p}; it must be above 0 and at most 1. Use top_p=1.0 for all tokens."
            )
        return problems


def sample(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw the next token of each row.

    Args:
      logits_BV: float logits.
      keys_B: a key of `jax.random` for each row, so that a row's tokens do not depend on other rows.
      sampling: how tokens are drawn.

    Returns:
      int32 (batch,).
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = mask_unlikely(logits_BV / sampling.temperature, sampling.top_k, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def mask_unlikely(logits_BV: jax.Array, top_k: int | None, top_p: float) -> jax.Array:
    """Set the logits of unlikely tokens to minus infinity; equal logits are treated alike.

    References:
      Fan et al. 2018, https://arxiv.org/abs/1805.04833, section 5.4 (top-k); Holtzman et al. 2020,
      https://arxiv.org/abs/1904.09751, section 3.1 (top-p).

    >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
    >>> jnp.isfinite(mask_unlikely(logits, 3, 1.0)).tolist()
    [[True, True, True, False]]
    >>> jnp.isfinite(mask_unlikely(logits, None, 0.6)).tolist()
    [[True, True, False, False]]
    """
    if top_k is not None and top_k < logits_BV.shape[-1]:
        lowest = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < lowest, -jnp.inf, logits_BV)
    if top_p < 1:
        ordered = jnp.sort(logits_BV, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered)
        # a token is kept if more likely tokens do not reach the probability: the first one always
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p
        lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < lowest, -jnp.inf, logits_BV)
    return logits_BV
