"""The traced program of a model's loss for a few rows on one device. Next: `row_draws.py`, which walks it."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType

from shardtrain.axes import AXES
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key

ONE = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
"""A mesh of axes of size 1: a few rows could not be sharded over the axes of a run's mesh."""


def trace_loss(
    model: Model,
    loss: Loss,
    batch: Mapping[str, Any],
    num_rows: int,
    train: bool = True,
    metrics: list[str] | None = None,
) -> ClosedJaxpr:
    """Trace a loss with its model; nothing is computed.

    Args:
      model: the whole model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: arrays or shapes of any number of rows.
      num_rows: the number of rows to trace.
      train: whether it is the loss of training, or that of held-out data.
      metrics: receives the names of the loss's metrics.

    Returns:
      A program of a key for rows, the parameters, the model's state and, last, the batch's arrays in the
      order of their names. Its first results are the sum and the count of the loss, and of each metric.
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
