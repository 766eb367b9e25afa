"""Losses as (sum, count): summed over examples or tokens, never averaged.

So the gradients of any split of a batch, uneven or with empty parts, add up to that of the batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax.core.spmd import get_logical_axis_rules

from shardtrain.errors.messages import problems_error
from shardtrain.functional.next_tokens import without_first
from shardtrain.functional.segments import apply_to_segments

Batch = Mapping[str, jax.Array]
Apply = Callable[..., Any]
Loss = Callable[[Apply, Batch], tuple[Any, ...]]
"""(apply, batch) -> (sum, count), or (sum, count, metrics) with metrics: name -> (sum, count)."""


@runtime_checkable
class LogitsInChunks(Protocol):
    """Logits that exist for a chunk of tokens at a time, as `models.chunked_logits.ChunkedLogits`."""

    def sum_chunks(self, compute: Callable[..., Any], *of_tokens: jax.Array) -> Any:
        """Add up compute(logits, *arrays) -> (loss, others) over chunks; padding is 0 in all arrays."""
        ...


def cross_entropy(
    logits: jax.Array | LogitsInChunks, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the summed softmax cross-entropy.

    Args:
      logits: float (..., V); or in chunks, of which one exists at a time.
      targets: integer (...), from 0 to V - 1; any other makes the sum NaN, unless its weight is 0.
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
    # its dtype may be too small for all classes
    targets = jnp.broadcast_to(targets.astype(jnp.int32), logits.shape[:-1])
    losses = _entropies(logits.astype(jnp.float32), targets, weights != 0)
    # an invalid target gives NaN, which is noticed; a wrong number would not be
    no_class = ((targets < 0) | (targets >= logits.shape[-1])) & (weights != 0)
    return jnp.where(no_class.any(), jnp.nan, (losses * weights).sum()), weights.sum()


@jax.custom_jvp
def _entropies(logits: jax.Array, targets: jax.Array, counts: jax.Array) -> jax.Array:
    """Return the cross-entropy of each target that counts, and 0 of the others, whose logits may be infinite.

    The derivative is one expression of the logits and the logarithms of their sums. Those of the single steps
    take a GPU longer than reading the logits does.

    Args:
      logits: float32 (..., V).
      targets: int32 (...).
      counts: bool (...).
    """
    return _entropies_and_sums(logits, targets, counts)[0]


def _entropies_and_sums(
    logits: jax.Array, targets: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropies, and the logarithm of the sum of each target's exponentials."""
    highest = logits.max(-1)
    shifted = logits - highest[..., None]
    rules: Any = get_logical_axis_rules()
    if getattr(rules, "one_device", False) and not rules.any_mesh:
        own = jnp.take_along_axis(logits, targets[..., None], -1, mode="clip")[..., 0] - highest
    else:
        # logits that are sharded over the vocabulary stay sharded, unlike by a gather
        own = jnp.where(_is_target(logits, targets), shifted, 0).sum(-1)
    sums = jnp.log(jnp.exp(shifted).sum(-1))
    return jnp.where(counts, sums - own, 0), sums + highest


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return classes == targets[..., None]


@_entropies.defjvp
def _entropies_derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    logits, targets, counts = primals
    losses, sums = _entropies_and_sums(logits, targets, counts)
    slopes = jnp.exp(logits - sums[..., None]) - _is_target(logits, targets)
    # where a target does not count, the slope of an infinite logit is not a number
    return losses, (jnp.where(counts[..., None], slopes, 0) * tangents[0]).sum(-1)


def soft_cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the summed softmax cross-entropy with targets that are shares of all classes.

    Args:
      logits: float (..., V).
      targets: float (..., V), which add up to 1.
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


def _ranked(batch: Batch, **ranks: int) -> None:
    """Refuse arrays with more or fewer dims than the loss expects.

    Raises:
      ValueError: lists every array of another number of dims.
    """
    problems = []
    for name, rank in ranks.items():
        shape = jnp.shape(batch[name])
        if len(shape) > rank:
            problems.append(
                f"{name!r} has shape {shape} in a batch, so each sample has shape {shape[1:]}: it seems to be"
                f" a batch already; give {shape[1]} samples of shape {shape[2:]} instead, batches are made of"
                " them"
            )
        elif len(shape) < rank:
            problems.append(f"{name!r} has shape {shape} in a batch; give samples with {rank - 1} dims")
    if problems:
        raise problems_error("the samples do not fit the loss", problems)


def target_weights(batch: Batch, targets: jax.Array) -> jax.Array:
    """Return the weight of each target, float32 (B, T), from the weights of the batch.

    Args:
      batch: its "weights" are per row (B,), per target (B, T), or per token (B, T + 1), the first being
        unused.
      targets: (B, T).

    Raises:
      ValueError: the weights have another shape.
    """
    weights, (rows, num) = batch["weights"], targets.shape
    if weights.shape == (rows, num + 1):
        return without_first(weights)
    if weights.shape not in ((rows,), (rows, 1), (rows, num)):
        raise ValueError(
            f"weights have shape {weights.shape}, and targets {targets.shape}; give one for each row"
            f" ({rows},), each target ({rows}, {num}) or each token ({rows}, {num + 1})"
        )
    return jnp.broadcast_to(weights.reshape(rows, -1), targets.shape)


def next_token_loss(apply: Apply, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of next-token prediction.

    Args:
      apply: tokens int32 (B, T), and segments if the batch has them -> logits (B, T, V).
      batch: "tokens" int32 (B, T + 1), any, as -100, of weight 0; "weights" float32, see `target_weights`;
        and, optionally, "segments" int32 (B, T), the number of each input's document.

    Returns:
      (sum in nats, number of tokens).
    """
    _ranked(batch, tokens=2)
    logits = apply_to_segments(apply, batch["tokens"][:, :-1], batch.get("segments"))
    targets = without_first(batch["tokens"])
    return cross_entropy(logits, targets, target_weights(batch, targets))


def masked_token_loss(apply: Apply, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of masked tokens (BERT).

    Args:
      apply: tokens int32 (B, T), and if the batch has one of them mask and segments -> logits (B, T, V).
      batch: "tokens" int32 (B, T), as the model reads them; "targets" int32 (B, T), the original tokens;
        "chosen" (B, T), 1 where the target counts; "weights" float32 (B,) or (B, T); and, optionally,
        "mask" (B, T), 0 for padding, and "segments" int32 (B, T). See `shardtrain.data.MaskedTokens`.

    Returns:
      (sum in nats, number of chosen tokens).
    """
    _ranked(batch, tokens=2, targets=2, chosen=2)
    inputs = [batch["tokens"]]
    if "mask" in batch or "segments" in batch:
        ones, zeros = jnp.ones_like(batch["tokens"]), jnp.zeros_like(batch["tokens"])
        inputs += [batch.get("mask", ones), batch.get("segments", zeros)]
    weights = batch["chosen"].astype(jnp.float32) * target_weights(batch, batch["targets"])
    return cross_entropy(apply(*inputs), batch["targets"], weights)


def translation_loss(apply: Apply, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of next-token prediction of a target sequence, given a source sequence.

    Args:
      apply: source int32 (B, S), target int32 (B, T), and if the batch has one its mask -> logits (B, T, V).
      batch: "source" int32 (B, S); "target" int32 (B, T + 1); "weights" as for `next_token_loss`; and,
        optionally, "source_mask" (B, S), 0 for padding of the source.

    Returns:
      (sum in nats, number of tokens).
    """
    _ranked(batch, source=2, target=2)
    masks = [batch["source_mask"]] if "source_mask" in batch else []
    logits = apply(batch["source"], batch["target"][:, :-1], *masks)
    targets = without_first(batch["target"])
    return cross_entropy(logits, targets, target_weights(batch, targets))


def classification_loss(
    apply: Apply, batch: Batch
) -> tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Return the cross-entropy of classification, with the accuracy as a metric.

    Args:
      apply: image (B, ...) -> logits (B, V).
      batch: "image"; "label" int32 (B,), or float (B, V), the share of each class, of mixed or smoothed
        labels; "weights" float32 (B,).

    Returns:
      (sum in nats, number of examples, {"accuracy": (number of correct ones, number of examples)}); correct
      is what has the largest share.
    """
    label, weights = batch["label"], batch["weights"]
    is_soft = is_soft_label(label)
    _ranked(batch, label=1 + is_soft, weights=1)
    logits = apply(batch["image"])
    entropy = soft_cross_entropy if is_soft else cross_entropy
    total, count = entropy(logits, label, weights)
    correct = (jnp.argmax(logits, -1) == hard_label(label)) * weights
    return total, count, {"accuracy": (correct.sum(), count)}


def is_soft_label(label: jax.Array) -> bool:
    """Whether labels are a float for each class (B, V), not the numbers of classes."""
    return label.ndim == 2 and jnp.issubdtype(label.dtype, jnp.floating)


def hard_label(label: jax.Array) -> jax.Array:
    """Return the class with the largest share, int (B,), of labels of either form."""
    return jnp.argmax(label, -1) if is_soft_label(label) else label


CLASSES: dict[Any, Mapping[str, tuple[str, ...]]] = {
    next_token_loss: {"tokens": ("weights",)},
    masked_token_loss: {"tokens": ("weights",), "targets": ("chosen", "weights")},
    translation_loss: {"target": ("weights",)},
    classification_loss: {"label": ("weights",)},
}
"""Loss -> the arrays of a batch that have class indices, each with the arrays of weights that mask them."""
