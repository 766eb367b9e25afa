"""Trace the operators of a model's loss as a step of a layout computes it. Next: `jaxpr/operators.py`."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key
from shardtrain.jaxpr.operators import OperatorPass, run_operators
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.replica_sums import BoundModel


def trace_operators(
    model: Model, loss: Loss, batch: Mapping[str, Any], layout: Layout, mesh: Mesh | AbstractMesh
) -> OperatorPass:
    """Trace the loss of one replica, with the shardings of the layout, without devices.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: a microbatch of all replicas, arrays or shapes.
      layout: the layout.
      mesh: its mesh.

    Returns:
      What it found: `operators`, and by `check` what does not fit them.
    """
    num_replicas = math.prod(mesh.shape[axis] for axis in layout.replica_axes)
    num_rows = next(iter(batch.values())).shape[0] // num_replicas
    rows = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    params, model_state = jax.eval_shape(model.init, new_key(0))
    each = OperatorPass(table=layout.operators, sizes=mesh.shape)

    def compute(params: Any, model_state: Any, rows: Any) -> Any:
        return sum_loss(loss, BoundModel(model, params, model_state, row_key(new_key(0), 0, num_rows)), rows)

    with activation_rules(layout.rules_of_replica(), mesh, *layout.tracing):
        jax.eval_shape(run_operators(compute, each), params, model_state, rows)
    return each
