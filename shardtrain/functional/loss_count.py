"""What a loss counts in some rows, such as tokens, found without running the model."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from shardtrain.functional.auxiliary import summed_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key
from shardtrain.functional.unused_parameters import ONE


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
    params, model_state = jax.eval_shape(lambda: model.init(new_key(0)))
    others = (params, model_state, jax.eval_shape(lambda: new_key(0)))

    def count(params: Any, model_state: Any, key: jax.Array, batch: Batch) -> jax.Array:
        apply = lambda *inputs: model.apply(params, model_state, key, True, *inputs)[0]  # noqa: E731
        return summed_loss(loss, apply, batch, rng=key)[1]

    with jax.sharding.use_abstract_mesh(ONE):
        traced = jax.make_jaxpr(count)(*others, dict(batch))
    needed, is_used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    number = len(jax.tree.leaves(others))
    if any(is_used[:number]):
        return None
    arrays = [x for x, used in zip(jax.tree.leaves(dict(batch)), is_used[number:], strict=True) if used]
    (found,) = jaxpr_as_fun(ClosedJaxpr(needed, traced.consts))(*arrays)
    return float(found)
