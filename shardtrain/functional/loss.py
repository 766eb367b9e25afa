"""Compute losses as (sum, count): summed over examples or tokens, never averaged.

Therefore the gradients of any split of a batch, uneven or with empty parts, add up to those of the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardtrain.axes import CONTEXT
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.functional.cross_entropy import (
    cross_entropy,
    soft_cross_entropy,
    sum_regularized_cross_entropy,
)


def drop_first(x_BT: jax.Array) -> jax.Array:
    """Drop the first position of each row, (B, T - 1), on an unsharded sequence.

    On a sharded sequence XLA would send border positions by a collective-permute, which can deadlock pipeline
    stages: all devices of a mesh join a permute.

    Args:
      x_BT: (B, T), such as tokens.

    >>> import jax.numpy as jnp
    >>> drop_first(jnp.arange(4)[None]).tolist()
    [[1, 2, 3]]
    """
    x_BT = x_BT[:, 1:]
    if jax.sharding.get_abstract_mesh().shape.get(CONTEXT, 1) == 1:
        return x_BT
    return jax.lax.with_sharding_constraint(x_BT, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))


def apply_to_segments(apply: Callable[..., Any], tokens: jax.Array, segments: jax.Array | None) -> Any:
    """Call a model with tokens, and with segments if they are given.

    Args:
      apply: the model.
      tokens: int32 (B, T).
      segments: int32 (B, T), or None.

    Raises:
      ValueError: the model takes no segments, so its attention would cross document borders.
    """
    if segments is None:
        return apply(tokens)
    try:
        return apply(tokens, segments)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(
            "the batch has segments (documents that do not see each other), and the model takes none"
            f" ({error}); use data with --data.packing joined, or a model whose call takes both,"
            " as that of DecoderConfig"
        ) from error


Batch = Mapping[str, jax.Array]
Apply = Callable[..., Any]
Loss = Callable[[Apply, Batch], tuple[Any, ...]]
"""(apply, batch) -> (sum, count), or (sum, count, metrics) with metrics: name -> (sum, count)."""
Entropy = Callable[[Any, jax.Array, jax.Array], tuple[Any, ...]]
"""(logits, targets, weights) -> the result of a loss, such as `cross_entropy`."""


@dataclass(frozen=True)
class Regularized:
    """A token loss with label smoothing and z-loss in training, and without them for held-out data.

    The plain cross-entropy is logged as the metric `cross_entropy`.

    Args:
      loss: `next_token_loss`, `masked_token_loss`, `translation_loss`, or a function of yours that calls its
        argument `entropy` in place of `cross_entropy` and returns its result.
      label_smoothing: fraction of each target that is spread evenly over all classes, from 0 to below 1.
      z_loss: weight of the squared logarithm of the softmax's denominator, 0 or more; 1e-4 in PaLM.

    Raises:
      ValueError: lists every value out of range, and a loss without the argument `entropy`.

    >>> loss = Regularized(next_token_loss, label_smoothing=0.1, z_loss=1e-4)
    """

    loss: Callable[..., tuple[Any, ...]]
    _: KW_ONLY
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"label_smoothing is {self.label_smoothing}; use 0 (none) or more, below 1")
        if not 0 <= self.z_loss < float("inf"):
            problems.append(f"z_loss is {self.z_loss}; use 0 (none) or more, such as 1e-4")
        if callable(self.loss) and not _takes_entropy(self.loss):
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            problems.append(
                f"loss is {name}, which takes no argument `entropy`; use next_token_loss, masked_token_loss,"
                " translation_loss, or one that calls its argument `entropy` as cross_entropy. Metrics go"
                " outside: add_metrics(Regularized(loss, ...), ...)"
            )
        refuse("this loss cannot be regularized", problems)

    @property
    def for_evaluation(self) -> "Regularized":
        """The loss without label smoothing and z-loss, see `find_evaluation_loss`."""
        is_plain = self.label_smoothing == self.z_loss == 0
        return self if is_plain else replace(self, label_smoothing=0.0, z_loss=0.0)

    def __call__(self, apply: Apply, batch: Batch) -> tuple[Any, ...]:
        """Return (sum in nats, count, metrics)."""
        options = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return self.loss(apply, batch, entropy=partial(sum_regularized_cross_entropy, **options))


def find_evaluation_loss(loss: Loss) -> Loss:
    """Return the loss of held-out data: the attribute `for_evaluation` of a loss, or the loss itself.

    It returns metrics with the same names.
    """
    return getattr(loss, "for_evaluation", loss)


def _takes_entropy(loss: Callable[..., Any]) -> bool:
    try:
        parameters = signature(loss, follow_wrapped=False).parameters
    except ValueError:  # of builtin functions
        return False
    return "entropy" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _check_ranks(batch: Batch, **ranks: int) -> None:
    """Check the number of dims of the arrays of a batch.

    Raises:
      ValueError: lists every array with another number of dims.
    """
    problems = []
    for name, rank in ranks.items():
        shape = jnp.shape(batch[name])
        if len(shape) > rank:
            problems.append(
                f"{name!r} has shape {shape} in a batch, so each sample has shape {shape[1:]}: it seems to be"
                f" a batch already; give {shape[1]} samples of shape {shape[2:]} instead"
            )
        elif len(shape) < rank:
            problems.append(f"{name!r} has shape {shape} in a batch; give samples with {rank - 1} dims")
    refuse("the samples do not fit the loss", problems)


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
        return drop_first(weights)
    if weights.shape not in ((rows,), (rows, 1), (rows, num)):
        raise ValueError(
            f"weights have shape {weights.shape}, and targets {targets.shape}; give one for each row"
            f" ({rows},), each target ({rows}, {num}) or each token ({rows}, {num + 1})"
        )
    return jnp.broadcast_to(weights.reshape(rows, -1), targets.shape)


def next_token_loss(apply: Apply, batch: Batch, entropy: Entropy = cross_entropy) -> tuple[Any, ...]:
    """Return the cross-entropy of next-token prediction.

    Args:
      apply: tokens int32 (B, T), and segments if the batch has them -> logits (B, T, V).
      batch: "tokens" int32 (B, T + 1), any number where the weight is 0; "weights" float32, see
        `target_weights`; and, optionally, "segments" int32 (B, T), the document number of each input.
      entropy: see `Entropy`.

    Returns:
      (sum in nats, number of tokens).
    """
    _check_ranks(batch, tokens=2)
    logits = apply_to_segments(apply, batch["tokens"][:, :-1], batch.get("segments"))
    targets = drop_first(batch["tokens"])
    return entropy(logits, targets, target_weights(batch, targets))


def masked_token_loss(apply: Apply, batch: Batch, entropy: Entropy = cross_entropy) -> tuple[Any, ...]:
    """Return the cross-entropy of masked tokens (BERT).

    Args:
      apply: tokens int32 (B, T), and mask and segments if the batch has one of them -> logits (B, T, V).
      batch: "tokens" int32 (B, T), as the model reads them; "targets" int32 (B, T), the original tokens;
        "chosen" (B, T), 1 where the target counts; "weights" float32 (B,) or (B, T); and, optionally,
        "mask" (B, T), 0 for padding, and "segments" int32 (B, T). See `shardtrain.data.MaskedTokens`.
      entropy: see `Entropy`.

    Returns:
      (sum in nats, number of chosen tokens).
    """
    _check_ranks(batch, tokens=2, targets=2, chosen=2)
    inputs = [batch["tokens"]]
    if "mask" in batch or "segments" in batch:
        ones, zeros = jnp.ones_like(batch["tokens"]), jnp.zeros_like(batch["tokens"])
        inputs += [batch.get("mask", ones), batch.get("segments", zeros)]
    weights = batch["chosen"].astype(jnp.float32) * target_weights(batch, batch["targets"])
    return entropy(apply(*inputs), batch["targets"], weights)


def translation_loss(apply: Apply, batch: Batch, entropy: Entropy = cross_entropy) -> tuple[Any, ...]:
    """Return the cross-entropy of next-token prediction of a target sequence, given a source sequence.

    Args:
      apply: source int32 (B, S), target int32 (B, T), and the mask if the batch has one -> logits (B, T, V).
      batch: "source" int32 (B, S); "target" int32 (B, T + 1); "weights" as for `next_token_loss`; and,
        optionally, "source_mask" (B, S), 0 for padding of the source.
      entropy: see `Entropy`.

    Returns:
      (sum in nats, number of tokens).
    """
    _check_ranks(batch, source=2, target=2)
    masks = [batch["source_mask"]] if "source_mask" in batch else []
    logits = apply(batch["source"], batch["target"][:, :-1], *masks)
    targets = drop_first(batch["target"])
    return entropy(logits, targets, target_weights(batch, targets))


def classification_loss(
    apply: Apply, batch: Batch
) -> tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Return the cross-entropy of classification, with the accuracy as a metric.

    Args:
      apply: image (B, ...) -> logits (B, V).
      batch: "image"; "label" int32 (B,), or soft labels, float (B, V), such as mixed or smoothed ones;
        "weights" float32 (B,).

    Returns:
      (sum in nats, number of examples, {"accuracy": (number of correct ones, number of examples)}). With
      soft labels the class with the largest probability is correct.
    """
    label, weights = batch["label"], batch["weights"]
    is_soft = is_soft_label(label)
    _check_ranks(batch, label=1 + is_soft, weights=1)
    logits = apply(batch["image"])
    entropy = soft_cross_entropy if is_soft else cross_entropy
    total, count = entropy(logits, label, weights)
    correct = (jnp.argmax(logits, -1) == hard_label(label)) * weights
    return total, count, {"accuracy": (correct.sum(), count)}


def is_soft_label(label: jax.Array) -> bool:
    """Return whether labels are soft, float (B, V), and not class indices."""
    return label.ndim == 2 and jnp.issubdtype(label.dtype, jnp.floating)


def hard_label(label: jax.Array) -> jax.Array:
    """Return the class index of labels, int (B,); of soft labels that of the largest probability."""
    return jnp.argmax(label, -1) if is_soft_label(label) else label


CLASSES: dict[Any, Mapping[str, tuple[str, ...]]] = {
    next_token_loss: {"tokens": ("weights",)},
    masked_token_loss: {"tokens": ("weights",), "targets": ("chosen", "weights")},
    translation_loss: {"target": ("weights",)},
    classification_loss: {"label": ("weights",)},
}
"""Loss -> arrays of a batch with class indices -> the arrays of weights that mask them."""
