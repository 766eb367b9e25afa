"""Models without a trainer: their parameters as shapes, and models with given parameters."""

from typing import Any

from flax import nnx


def list_parameters(config: Any, kind: Any = nnx.Param) -> Any:
    """Return path and variable (shape, dtype, metadata) of every parameter; nothing is computed."""
    return nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: config(nnx.Rngs(0))), kind))


def fill(config: Any, params: Any) -> Any:
    """Return the model with these parameters, without dropout or running statistics."""
    graph, state = nnx.split(nnx.eval_shape(lambda: config(nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
