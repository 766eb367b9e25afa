"""Add metrics to a loss, computed from the same outputs of the model, for training and held-out data.

Next: `loss.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.loss import (
    Apply,
    Batch,
    Loss,
    drop_first,
    find_evaluation_loss,
    hard_label,
    target_weights,
)
from shardtrain.functional.loss_guard import check_result
from shardtrain.functional.model_calls import ModelCall, split_options

Metric = Callable[[Any, Batch], tuple[Any, Any]]
"""(outputs of the model, batch) -> (sum, count), each a scalar. Padding rows, whose weight in
`batch["weights"]` is 0, must add nothing."""


@dataclass(frozen=True)
class LossWithMetrics:
    """A loss that also returns metrics, see `add_metrics`."""

    loss: Loss
    metrics: Mapping[str, Metric]

    @property
    def for_evaluation(self) -> "LossWithMetrics":
        """The same metrics with the loss of held-out data, see `loss.find_evaluation_loss`."""
        plain = find_evaluation_loss(self.loss)
        return self if plain is self.loss else replace(self, loss=plain)

    def __call__(self, apply: Apply, batch: Batch) -> tuple[Any, Any, dict[str, Any]]:
        outputs: list[Any] = []

        def recording(*inputs: Any) -> Any:
            given, options = split_options(inputs)
            outputs.append(apply(*given, **options))
            return outputs[-1]

        recorded = ModelCall(recording, getattr(apply, "rng", None))
        loss_sum, count, metrics = check_result(self.loss(recorded, batch))
        if len(outputs) != 1:
            raise ValueError(
                f"metrics {', '.join(self.metrics)} need one call of the model, but the loss calls it"
                f" {len(outputs)} times; return them by the loss itself: (sum, count, {{name: (sum, count)}})"
            )
        if twice := metrics.keys() & self.metrics.keys():
            raise ValueError(f"the loss returns metrics {', '.join(sorted(twice))} itself; use other names")
        # no gradient of the loss depends on a metric
        fixed = jax.lax.stop_gradient(outputs[0])
        return loss_sum, count, {**metrics, **{name: of(fixed, batch) for name, of in self.metrics.items()}}


def add_metrics(loss: Loss, **metrics: Metric) -> Loss:
    """Add metrics to a loss; each is logged as `train/NAME` and `heldout/NAME`.

    Args:
      loss: any loss that calls the model once.
      **metrics: name -> (outputs of the model, batch) -> (sum, count), float scalars.

    Returns:
      The loss with these metrics in addition to its own.

    Raises:
      ValueError: (when called) a metric has the name of one that the loss returns itself, or the loss does
        not call the model exactly once.

    >>> def accuracy(logits, batch):
    ...     right = (logits.argmax(-1) == batch["label"]) * batch["weights"]
    ...     return right.sum(), batch["weights"].sum()
    >>> def loss(apply, batch):
    ...     return apply(batch["image"]).sum(), batch["weights"].sum()
    >>> import jax.numpy as jnp
    >>> batch = {"image": jnp.eye(2), "label": jnp.array([0, 0]), "weights": jnp.ones(2)}
    >>> total, count, found = add_metrics(loss, accuracy=accuracy)(lambda image: image, batch)
    >>> [float(x) for x in found["accuracy"]]
    [1.0, 2.0]
    """
    return LossWithMetrics(loss, metrics)


def next_token_accuracy(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Count the next tokens that the model predicts; a metric for `next_token_loss`.

    Args:
      logits: (B, T, V).
      batch: "tokens" int32 (B, T + 1) and "weights", as for `next_token_loss`.

    Returns:
      (number of correct tokens, number of tokens), float32 scalars.
    """
    targets = drop_first(batch["tokens"])
    weights = target_weights(batch, targets)
    return ((logits.argmax(-1) == targets) * weights).sum(), weights.sum()


@dataclass(frozen=True)
class TopAccuracy:
    """Count the examples whose class is among the `k` likeliest; a metric for `classification_loss`.

    `st.add_metrics(st.classification_loss, top5=TopAccuracy(5))` logs `train/top5` and `heldout/top5`. If
    classes are equally likely, the first one counts as likelier.

    Args:
      k: number of predicted classes, 1 or more.

    >>> logits, label = jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([1, 2])
    >>> [float(x) for x in TopAccuracy(2)(logits, {"label": label, "weights": jnp.ones(2)})]
    [1.0, 2.0]
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k is {self.k!r}; use 1 or more, such as TopAccuracy(5)")

    def __call__(self, logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return (number of correct examples, number of examples), float32 scalars.

        Args:
          logits: (B, V).
          batch: "label" and "weights", as for `classification_loss`.
        """
        # comparisons, not a sort: logits that are sharded over classes stay so
        label = hard_label(batch["label"]).astype(jnp.int32)[:, None]
        classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        # the logit of a label that is no class, or that is not a number, is below all others
        own = jnp.where(classes == label, logits, -jnp.inf).max(-1, keepdims=True)
        likelier = ~(logits <= own) | ((logits == own) & (classes < label))
        return ((likelier.sum(-1) < self.k) * batch["weights"]).sum(), batch["weights"].sum()
