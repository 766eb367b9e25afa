"""Compute softmax cross-entropy, summed over targets and never averaged; label smoothing and z-loss.

Next: `loss.py`, which reads batches and calls it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from shardtrain.functional.run_trace import TRACE


@runtime_checkable
class LogitsInChunks(Protocol):
    """Logits that are computed chunk by chunk, such as `models.chunked_logits.ChunkedLogits`."""

    def sum_chunks(self, compute: Callable[..., Any], *of_tokens: jax.Array) -> Any:
        """Add up compute(logits, *arrays) -> (loss, others) over chunks; padding is 0 in all arrays."""
        ...


def cross_entropy(
    logits: jax.Array | LogitsInChunks, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the summed softmax cross-entropy.

    Args:
      logits: float (..., V), or in chunks.
      targets: integer (...), from 0 to V - 1; any other target makes the sum NaN, unless its weight is 0.
      weights: float (...); weight 0 ignores a target. By default all are 1.

    Returns:
      (sum in nats, count), float32 scalars; count is the sum of the weights.

    >>> total, count = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]))
    >>> round(float(total / count), 4)  # log(4)
    1.3863
    """
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    if isinstance(logits, LogitsInChunks):
        return logits.sum_chunks(cross_entropy, targets, weights)
    return _sum(logits, targets, weights), weights.sum()


def sum_regularized_cross_entropy(
    logits: jax.Array | LogitsInChunks,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Return the summed softmax cross-entropy with label smoothing and a z-loss.

    Args:
      logits, targets, weights: as for `cross_entropy`; with `label_smoothing` logits must be finite.
      label_smoothing: fraction of each target that is spread evenly over all classes, from 0 to below 1.
      z_loss: weight of the squared logarithm of the sum of exponentials, which keeps that logarithm near 0.

    Returns:
      (sum in nats, count, {"cross_entropy": (unregularized sum, count)}), float32 scalars.

    References:
      Szegedy et al. 2016, Rethinking the Inception Architecture, https://arxiv.org/abs/1512.00567, section 7.
      Chowdhery et al. 2022, PaLM, https://arxiv.org/abs/2204.02311, section 5, whose z-loss has weight 1e-4.

    >>> total, count, _ = sum_regularized_cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]), z_loss=1.0)
    >>> round(float(total / count), 4)  # log(4) + log(4)**2
    3.3081
    """
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)

    def sums(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        plain = _sum(jax.lax.stop_gradient(logits), targets, weights)
        return _sum(logits, targets, weights, label_smoothing, z_loss), (plain, weights.sum())

    in_chunks = isinstance(logits, LogitsInChunks)
    found = logits.sum_chunks(sums, targets, weights) if in_chunks else sums(logits, targets, weights)
    total, (plain, count) = found
    return total, count, {"cross_entropy": (plain, count)}


def _sum(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    # its dtype may be too small for all classes
    targets = jnp.broadcast_to(targets.astype(jnp.int32), logits.shape[:-1])
    losses = _entropies(logits.astype(jnp.float32), targets, weights != 0, label_smoothing, z_loss)
    # an invalid target gives NaN, which is noticed; a wrong number would not be
    no_class = ((targets < 0) | (targets >= logits.shape[-1])) & (weights != 0)
    return jnp.where(no_class.any(), jnp.nan, (losses * weights).sum())


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _entropies(
    logits: jax.Array, targets: jax.Array, counts: jax.Array, label_smoothing: float, z_loss: float
) -> jax.Array:
    """Return the cross-entropy of each target that counts, and 0 for others, whose logits may be infinite.

    The derivative is one expression of the logits and the logarithms of their sums: the derivatives of the
    single operations take a GPU longer than reading the logits.

    Args:
      logits: float32 (..., V).
      targets: int32 (...).
      counts: bool (...).
      label_smoothing, z_loss: as for `sum_regularized_cross_entropy`.
    """
    return _entropies_and_sums(logits, targets, counts, label_smoothing, z_loss)[0]


def _entropies_and_sums(
    logits: jax.Array, targets: jax.Array, counts: jax.Array, label_smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropies, and the logarithm of the sum of each target's exponentials."""
    highest = logits.max(-1)
    shifted = logits - highest[..., None]
    trace = TRACE.get()
    if trace is not None and trace.is_one_device and not trace.any_mesh:
        own = jnp.take_along_axis(logits, targets[..., None], -1, mode="clip")[..., 0] - highest
    else:
        # logits that are sharded over the vocabulary stay sharded, unlike by a gather
        own = jnp.where(_is_target(logits, targets), shifted, 0).sum(-1)
    sums = jnp.log(jnp.exp(shifted).sum(-1))
    losses = sums - own
    if label_smoothing:
        losses += label_smoothing * (own - shifted.mean(-1))
    if z_loss:
        losses += z_loss * jnp.square(sums + highest)
    return jnp.where(counts, losses, 0), sums + highest


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return classes == targets[..., None]


@_entropies.defjvp
def _entropies_derivative(
    label_smoothing: float, z_loss: float, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    logits, targets, counts = primals
    losses, sums = _entropies_and_sums(logits, targets, counts, label_smoothing, z_loss)
    probabilities = jnp.exp(logits - sums[..., None])
    if z_loss:
        probabilities *= 1 + 2 * z_loss * sums[..., None]
    shares: Any = _is_target(logits, targets)
    if label_smoothing:
        shares = (1 - label_smoothing) * shares + label_smoothing / logits.shape[-1]
    slopes = probabilities - shares
    # where a target does not count, the slope of an infinite logit is not a number
    return losses, (jnp.where(counts[..., None], slopes, 0) * tangents[0]).sum(-1)


def soft_cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the summed softmax cross-entropy with soft labels.

    Args:
      logits: float (..., V).
      targets: float (..., V), probabilities that add up to 1.
      weights: float (...); weight 0 ignores a row.

    Returns:
      (sum in nats, count), float32 scalars; count is the sum of the weights.

    >>> total, count = soft_cross_entropy(jnp.zeros((1, 4)), jnp.array([[0.5, 0.5, 0, 0]]), jnp.ones(1))
    >>> round(float(total / count), 4)  # log(4)
    1.3863
    """
    if targets.shape[-1] != logits.shape[-1]:
        raise ValueError(
            f"soft labels are shares of {targets.shape[-1]} classes, and the model has {logits.shape[-1]};"
            " give data and model the same number of classes"
        )
    weights = weights.astype(jnp.float32)
    logits = jnp.where(weights[..., None] != 0, logits.astype(jnp.float32), 0)
    targets = jnp.where(weights[..., None] != 0, targets.astype(jnp.float32), 0)
    own = jnp.where(targets != 0, targets * logits, 0).sum(-1)
    losses = jax.nn.logsumexp(logits, -1) * targets.sum(-1) - own
    return (losses * weights).sum(), weights.sum()
