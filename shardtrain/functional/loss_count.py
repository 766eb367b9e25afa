"""What a loss counts in some rows, such as tokens, found without running the model."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.traced_loss import trace_loss


def loss_count(model: Model, loss: Loss, batch: Mapping[str, Any]) -> float | None:
    """Return the count of a loss for some rows; None if it depends on what the model computes.

    Only the operations that the count depends on are run.

    Args:
      model: the whole model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: arrays of a few rows.

    Raises:
      ValueError: the loss returns something else.
    """
    given = jax.tree.leaves(dict(batch))
    traced = trace_loss(model, loss, batch, len(given[0]))
    is_count = [number == 1 for number in range(len(traced.jaxpr.outvars))]
    needed, is_used = partial_eval.dce_jaxpr(traced.jaxpr, is_count)
    if any(is_used[: -len(given)]):
        return None
    arrays = [x for x, used in zip(given, is_used[-len(given) :], strict=True) if used]
    (found,) = jaxpr_as_fun(ClosedJaxpr(needed, traced.consts))(*arrays)
    return float(found)
