"""Find the parameters that a loss does not depend on: their gradients are always zero.

Next: `optim/optimizer.py`, whose option `decay_unused` decides whether they are decayed.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model, path_text
from shardtrain.functional.rng import new_key
from shardtrain.functional.traced_loss import ONE
from shardtrain.jaxpr.forward import prune


def find_unused_parameters(model: Model, loss: Loss, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Find the paths of the parameters that cannot change the training loss.

    Nothing is computed: the derivative of the loss along all parameters is traced and reduced by dead code
    elimination. A parameter of stacked layers counts as used if any layer uses it; an input of a function
    with its own derivative (`jax.custom_vjp`) always counts as used.

    Args:
      model: the whole model.
      loss: returns (sum, count), see `loss.Loss`.
      batch: arrays or shapes of a few rows.

    Raises:
      ValueError: the loss returns something else.
    """
    params, model_state = jax.eval_shape(model.init, new_key(0))

    def derivative(tangents: Any, params: Any, model_state: Any, key: jax.Array, batch: Batch) -> jax.Array:
        def loss_sum(params: Any) -> jax.Array:
            apply = lambda *inputs: model.apply(params, model_state, key, True, *inputs)[0]  # noqa: E731
            return sum_loss(loss, apply, batch, rng=key)[0]

        # whole numbers have no derivative
        floats = jax.tree.map(
            lambda x, t: t if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0),
            params,
            tangents,
        )
        return jax.jvp(loss_sum, (params,), (floats,))[1]

    key = jax.eval_shape(lambda: new_key(0))
    # not around `init`, where linen would take names of dims for axes of the mesh
    with jax.sharding.use_abstract_mesh(ONE):
        traced = jax.make_jaxpr(derivative)(params, params, model_state, key, batch)
    # the tangents come first among the inputs, in the order of the parameters
    _, is_used = prune(traced, [True])
    paths = [path_text(path) for path, _ in jax.tree.leaves_with_path(params)]
    return tuple(path for path, used in zip(paths, is_used, strict=False) if not used)
