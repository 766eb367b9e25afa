"""Trace a model's loss for a few rows on one device. Next: `checks/`, which reads the program."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType

from shardtrain.axes import AXES
from shardtrain.errors.user_code import UserCodeFailed
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key
from shardtrain.jaxpr.equations import ClosedJaxpr
from shardtrain.jaxpr.forward import evaluate, prune

ONE = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
"""A mesh with axes of size 1: a few rows could not be sharded over the axes of a run's mesh."""


Traced = TypeVar("Traced")


def trace_few_rows(trace: Callable[[int], Traced], most: int) -> tuple[Traced, int]:
    """Trace two rows, or more if the loss or the model cannot take two, as one of groups of four rows.

    Args:
      trace: number of rows -> what was traced.
      most: the other number of rows to try, such as those of a batch.

    Returns:
      What was traced, and of how many rows.

    Raises:
      Exception: `trace` raised it for both numbers.
    """
    try:
        return trace(2), 2
    except (UserCodeFailed, TypeError, ValueError):
        if most <= 2:
            raise
    return trace(most), most


def trace_loss(
    model: Model,
    loss: Loss,
    batch: Mapping[str, Any],
    num_rows: int,
    train: bool = True,
    metrics: list[str] | None = None,
) -> ClosedJaxpr:
    """Trace a loss with its model, without computing anything.

    Args:
      model: the whole model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: arrays or shapes of any number of rows.
      num_rows: the number of rows to trace.
      train: whether to trace the loss of training; False means that of held-out data.
      metrics: receives the names of the loss's metrics.

    Returns:
      A program whose inputs are a key for rows, the parameters, the model state and the arrays of the batch,
      by name. Its first outputs are the sum and the count of the loss, and of each metric.
    """
    rows = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    params, model_state = jax.eval_shape(model.init, new_key(0))
    key = jax.eval_shape(lambda: row_key(new_key(0), 0, num_rows, model.draws))

    def traced(key: jax.Array, params: Any, model_state: Any, batch: Batch) -> Any:
        changed = []

        def apply(*inputs: Any) -> Any:
            outputs, state = model.apply(params, model_state, key, train, *inputs)
            changed.append(state)
            return outputs

        found = sum_loss(loss, apply, batch, train, key)
        # as jax orders the entries of a dict
        (metrics if metrics is not None else []).extend(sorted(found[2]))
        return *found, changed

    # not around `init`, where linen would take names of dims for axes of the mesh
    with jax.sharding.use_abstract_mesh(ONE):
        return jax.make_jaxpr(traced)(key, params, model_state, rows)


def loss_count(model: Model, loss: Loss, batch: Mapping[str, Any]) -> float | None:
    """Compute the count of a loss for some rows, such as tokens; None if it depends on the model.

    Only the operations on which the count depends are run.

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
    needed, is_used = prune(traced, is_count)
    if any(is_used[: -len(given)]):
        return None
    arrays = [x for x, used in zip(given, is_used[-len(given) :], strict=True) if used]
    (found,) = evaluate(needed, arrays)
    return float(found)
