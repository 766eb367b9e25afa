"""Dynamic loss scaling for islands that compute in float16, whose gradients overflow and vanish early.

The loss is multiplied by a scale before the backward pass and the gradients are divided by it. Each island
has its own scale: it is halved when its gradients are not finite, and doubled after many finite steps
(Micikevicius et al., "Mixed Precision Training", 2018). It is a power of two, which rounds nothing. It may be
below 1, as gradients are sums over tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FIRST, LARGEST, SMALLEST = 2.0**15, 2.0**24, 2.0**-24
GOOD_STEPS = 2000
"""Number of finite steps in a row after which the scale is doubled."""


class LossScale(NamedTuple):
    """The scale of the loss.

    Args:
      scale: float32 scalar.
      good_steps: int32 scalar, steps since the scale changed.
    """

    scale: Any
    good_steps: Any


def init_loss_scale() -> LossScale:
    """Return the scale before the first step."""
    return LossScale(jnp.float32(FIRST), jnp.int32(0))


def adjust_loss_scale(loss_scale: Any, finite: jax.Array) -> Any:
    """Return the scale after a step.

    Args:
      loss_scale: a `LossScale`; () if the loss is not scaled, and then () is returned.
      finite: whether this island's own gradients are finite.

    >>> adjust_loss_scale(LossScale(jnp.float32(8), jnp.int32(3)), jnp.bool(False))
    LossScale(scale=Array(4., dtype=float32), good_steps=Array(0, dtype=int32))
    """
    if not loss_scale:
        return loss_scale
    scale, good_steps = loss_scale
    good_steps = jnp.where(finite, good_steps + 1, 0)
    grows = good_steps >= GOOD_STEPS
    factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
    return LossScale(jnp.clip(scale * factor, SMALLEST, LARGEST), jnp.where(grows, 0, good_steps))


def is_overflow(loss_scale: LossScale, loss_sum: jax.Array, finite: jax.Array) -> jax.Array:
    """Return whether gradients may have overflowed because of the scale, so that a smaller one helps."""
    return jnp.isfinite(loss_sum) & ~finite & (loss_scale.scale > SMALLEST)


def get_scale(loss_scale: Any) -> Any:
    """Return the factor of the loss; 1 if it is not scaled."""
    return loss_scale.scale if loss_scale else 1
