"""Losses and metrics that a model has of its own beside its outputs, such as those of routers of experts.

A module whose call takes the argument `auxiliary` returns (outputs, object) if it is True; the object is an
`Auxiliary`, or None. Losses see the outputs alone (docs/decisions/0040). Next: `nnx_model.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from shardtrain.functional.loss import Apply, Batch, Loss, for_evaluation
from shardtrain.functional.loss_checks import checked
from shardtrain.functional.model_calls import ModelCall

AUXILIARY = "auxiliary"
"""The argument by which a module is asked for its own losses."""


class Auxiliary(Protocol):
    """What a model returns beside its outputs: a pytree of arrays whose first dim is the rows of a batch."""

    def losses(
        self, weights: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
        """Return (what is added to the mean loss, metrics: name -> (sum, count)).

        Args:
          weights: float32 (rows,), how much a row counts; 0 for padding. Where the batch has weights of
            tokens, 1 for a row with one that is not 0.
          count: float32 scalar, what the loss counts in these rows.
        """
        ...


@partial(jax.tree_util.register_dataclass, data_fields=("outputs", "auxiliary"), meta_fields=("train",))
@dataclass(frozen=True)
class Outputs:
    """The outputs of a model that has losses of its own.

    Args:
      outputs: as the module returns them.
      auxiliary: an `Auxiliary`.
      train: whether its losses count; its metrics always do.
    """

    outputs: Any
    auxiliary: Any
    train: bool = False


def plain(outputs: Any) -> Any:
    """Return the outputs of a model without the losses of its own."""
    return outputs.outputs if isinstance(outputs, Outputs) else outputs


def summed_loss(
    loss: Loss, apply: Apply, batch: Batch, train: bool = True, rng: jax.Array | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return (sum, count, metrics) of a loss, with those that the model has of its own.

    A loss that calls the model several times gets their mean.

    Args:
      loss: returns (sum, count) or (sum, count, metrics), see `loss.Loss`.
      apply: the model; it returns outputs, or `Outputs`.
      batch: what the loss reads; "weights" (rows, ...), if there are some, weigh the rows.
      train: whether it is the loss of training, or that of held-out data.
      rng: the key of the model's call, from which the loss has its `apply.key`; None: the attribute `rng` of
        the model.

    Raises:
      ValueError: the loss returns something else, or a metric that the model has too.
    """
    found: list[Outputs] = []

    def without_auxiliary(*inputs: Any) -> Any:
        outputs = apply(*inputs)
        if isinstance(outputs, Outputs):
            found.append(outputs)
        return plain(outputs)

    loss, rng = loss if train else for_evaluation(loss), getattr(apply, "rng", None) if rng is None else rng
    loss_sum, count, metrics = checked(loss(ModelCall(without_auxiliary, rng), batch))
    for outputs in found:
        rows = jax.tree.leaves(outputs.auxiliary)[0].shape[0]
        weights = batch.get("weights")
        if weights is None or weights.shape[0] != rows:
            weights = jnp.ones(rows)
        # a row counts if any of its tokens does
        weights = weights if weights.ndim == 1 else (weights.reshape(rows, -1) != 0).any(1)
        penalty, own = outputs.auxiliary.losses(weights.astype(jnp.float32), jnp.float32(count) / len(found))
        if twice := sorted(metrics.keys() & own.keys()) if outputs is found[0] else ():
            raise ValueError(f"the loss returns metrics {', '.join(twice)}, as the model does; rename them")
        before = {name: metrics.get(name, (0, 0)) for name in own}
        metrics = {**metrics, **jax.tree.map(jnp.add, before, own)}
        if outputs.train:
            loss_sum += penalty * count / len(found)
    return loss_sum, count, metrics
