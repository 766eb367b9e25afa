"""Models without a trainer: their parameters as shapes, and models with given parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.run_trace import find_model_ops
from shardtrain.models.ops import set_ops
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh


def list_parameters(config: Any, kind: Any = nnx.Param) -> Any:
    """Return path and variable (shape, dtype, metadata) of every parameter; nothing is computed."""
    return nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: config(nnx.Rngs(0))), kind))


def fill(config: Any, params: Any) -> Any:
    """Return the model with these parameters, without dropout or running statistics."""
    graph, state = nnx.split(nnx.eval_shape(lambda: config(nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def make_loss(config: Any, inputs: Any, ops: Any = None, num_devices: int = 1) -> tuple[Any, Any]:
    """Return the sum of the squares of a model's outputs, a function of its parameters, and parameters.

    Args:
      config: of the model.
      inputs: the only ones.
      ops: operations of the model; None takes those of the run.
      num_devices: over which rules shard examples.
    """
    graph, params = nnx.split(nnx.eval_shape(lambda: config(nnx.Rngs(0))), nnx.Param)

    # parameters that are not 0 and 1, so that biases and gains matter
    def value(path, x):
        mean = "scale" in jax.tree_util.keystr(path)
        return jnp.asarray(mean + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape), x.dtype)

    layout = Layout(mesh={"data": num_devices} if num_devices > 1 else {})
    mesh = make_mesh(layout, jax.devices()[:num_devices])

    def loss(params):
        with activation_rules(layout.activation_rules, mesh, *layout.tracing):
            model = set_ops(nnx.merge(graph, params), find_model_ops() if ops is None else ops)
            return jnp.square(model(inputs)).sum()

    return loss, jax.tree.map_with_path(value, params)
