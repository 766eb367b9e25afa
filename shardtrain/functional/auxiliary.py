"""Add the losses and metrics that a model computes itself, such as those of expert routers.

A module whose call takes the argument `auxiliary` returns (outputs, object) if it is True; the object is an
`Auxiliary`, or None. Losses see only the outputs (docs/decisions/0040). Next: `nnx_model.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from shardtrain.functional.loss import Apply, Batch, Loss, find_evaluation_loss
from shardtrain.functional.loss_guard import check_result
from shardtrain.functional.model_calls import ModelCall
from shardtrain.jaxpr.forward import evaluate, prune

AUXILIARY = "auxiliary"
"""The argument of a module that requests its own losses."""


class Auxiliary(Protocol):
    """What a model returns in addition to its outputs: a pytree of arrays whose first dim is the rows."""

    def losses(
        self, weights: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
        """Return (penalty added to the mean loss, metrics: name -> (sum, count)).

        Args:
          weights: float32 (rows,), the count of the loss in each row, such as tokens; 0 for padding.
          count: float32 scalar, the sum of the weights.
        """
        ...


@partial(jax.tree_util.register_dataclass, data_fields=("outputs", "auxiliary"), meta_fields=("train",))
@dataclass(frozen=True)
class Outputs:
    """The outputs of a model that has losses of its own.

    Args:
      outputs: as the module returns them.
      auxiliary: an `Auxiliary`.
      train: whether its losses are added; its metrics always are.
    """

    outputs: Any
    auxiliary: Any
    train: bool = False


def plain(outputs: Any) -> Any:
    """Return the outputs of a model without its own losses."""
    return outputs.outputs if isinstance(outputs, Outputs) else outputs


def sum_loss(
    loss: Loss, apply: Apply, batch: Batch, train: bool = True, rng: jax.Array | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return (sum, count, metrics) of a loss, with the model's own losses and metrics added.

    If the loss calls the model several times, the mean over the calls is added.

    Args:
      loss: returns (sum, count) or (sum, count, metrics), see `loss.Loss`.
      apply: the model; it returns outputs, or `Outputs`.
      batch: the batch of the loss.
      train: whether to compute the loss of training; False means that of held-out data.
      rng: the key of the model's call, from which `apply.key` is derived; None means the attribute `rng` of
        the model.

    Raises:
      ValueError: the loss returns something else, or a metric with the name of one of the model.
    """
    called: list[Any] = []

    def drop_auxiliary(*inputs: Any) -> Any:
        called.append(apply(*inputs))
        return plain(called[-1])

    loss, rng = (
        loss if train else find_evaluation_loss(loss),
        getattr(apply, "rng", None) if rng is None else rng,
    )
    loss_sum, count, metrics = check_result(loss(ModelCall(drop_auxiliary, rng), batch))
    found = [outputs for outputs in called if isinstance(outputs, Outputs)]
    for outputs in found:
        rows = jax.tree.leaves(outputs.auxiliary)[0].shape[0]
        weights = _count_rows(loss, [plain(each) for each in called], batch, rows, count) / len(found)
        penalty, own = outputs.auxiliary.losses(weights, jnp.float32(count) / len(found))
        if twice := sorted(metrics.keys() & own.keys()) if outputs is found[0] else ():
            raise ValueError(f"the loss returns metrics {', '.join(twice)}, as the model does; rename them")
        before = {name: metrics.get(name, (0, 0)) for name in own}
        metrics = {**metrics, **jax.tree.map(jnp.add, before, own)}
        if outputs.train:
            loss_sum += penalty * count / len(found)
    return loss_sum, count, metrics


def _count_rows(loss: Loss, outputs: Sequence[Any], batch: Batch, rows: int, total: Any) -> jax.Array:
    """Return the count of a loss in each row, float32 (rows,): the derivative of the count times the weights.

    These counts add up over any split of a batch, also if rows count differently. A count without a
    derivative, such as a number of weights above 0, is divided in proportion to the nonzero weights.

    Args:
      loss: returns (sum, count), see `loss.Loss`.
      outputs: the outputs of its calls of the model, in order.
      batch: its batch.
      rows: the number of rows.
      total: the count that it returned.
    """
    weights = batch.get("weights")
    if weights is None or weights.shape[0] != rows:
        weights = jnp.ones(rows)
    weights = weights.astype(jnp.float32)

    def count(weights: jax.Array) -> jax.Array:
        calls = iter(outputs)
        return jnp.float32(check_result(loss(lambda *_: next(calls), {**batch, "weights": weights}))[1])

    # the operations of the loss that the derivative of its count depends on, and no others
    traced = jax.make_jaxpr(lambda x, dx: jax.jvp(count, (x,), (dx,))[1])(weights, weights)
    needed, (reads_weights, has_derivative) = prune(traced, [True])
    if not has_derivative:
        present = (weights != 0).reshape(rows, -1).sum(1, dtype=jnp.float32)
        return present * total / jnp.maximum(present.sum(), 1)
    # a derivative of custom rules, as losses in chunks have, can be transposed, and has no derivative
    change = lambda dx: evaluate(needed, [*[weights] * reads_weights, dx])[0]  # noqa: E731
    (derivative,) = jax.linear_transpose(change, weights)(jnp.float32(1))
    return (weights * derivative).reshape(rows, -1).sum(1)
