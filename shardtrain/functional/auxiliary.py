"""Losses and metrics that a model has of its own beside its outputs, such as those of routers of experts.

A module whose call takes the argument `auxiliary` returns (outputs, object) if it is True; the object is an
`Auxiliary`, or None. Losses see the outputs alone (docs/decisions/0040). Next: `nnx_model.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from shardtrain.functional.loss import Apply, Batch, Loss, find_evaluation_loss
from shardtrain.functional.loss_checks import check_result
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
          weights: float32 (rows,), what the loss counts in each row, such as tokens; 0 for padding.
          count: float32 scalar, their sum.
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


def sum_loss(
    loss: Loss, apply: Apply, batch: Batch, train: bool = True, rng: jax.Array | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return (sum, count, metrics) of a loss, with those that the model has of its own.

    A loss that calls the model several times gets their mean.

    Args:
      loss: returns (sum, count) or (sum, count, metrics), see `loss.Loss`.
      apply: the model; it returns outputs, or `Outputs`.
      batch: what the loss reads.
      train: whether it is the loss of training, or that of held-out data.
      rng: the key of the model's call, from which the loss has its `apply.key`; None: the attribute `rng` of
        the model.

    Raises:
      ValueError: the loss returns something else, or a metric that the model has too.
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
        weights = _row_counts(loss, [plain(each) for each in called], batch, rows, count) / len(found)
        penalty, own = outputs.auxiliary.losses(weights, jnp.float32(count) / len(found))
        if twice := sorted(metrics.keys() & own.keys()) if outputs is found[0] else ():
            raise ValueError(f"the loss returns metrics {', '.join(twice)}, as the model does; rename them")
        before = {name: metrics.get(name, (0, 0)) for name in own}
        metrics = {**metrics, **jax.tree.map(jnp.add, before, own)}
        if outputs.train:
            loss_sum += penalty * count / len(found)
    return loss_sum, count, metrics


def _row_counts(loss: Loss, outputs: Sequence[Any], batch: Batch, rows: int, total: Any) -> jax.Array:
    """Return what a loss counts in each row, float32 (rows,): the weights of the row times their derivatives.

    They add up over any split of a batch, which a mean over rows times the count of the split does not where
    rows count differently. Where the count has no derivative, as a number of weights above 0 has none, it is
    divided as those that are not 0.

    Args:
      loss: returns (sum, count), see `loss.Loss`.
      outputs: what its calls of the model returned, in order.
      batch: what it read.
      rows: the number of rows.
      total: what it counted.
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
    needed, (reads_weights, has_derivative) = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    if not has_derivative:
        present = (weights != 0).reshape(rows, -1).sum(1, dtype=jnp.float32)
        return present * total / jnp.maximum(present.sum(), 1)
    change = partial(jaxpr_as_fun(ClosedJaxpr(needed, traced.consts)), *[weights] * reads_weights)
    # a derivative of custom rules, as losses in chunks have, can be transposed, and has no derivative
    (derivative,) = jax.linear_transpose(lambda dx: change(dx)[0], weights)(jnp.float32(1))
    return (weights * derivative).reshape(rows, -1).sum(1)
