"""Make any model compute in the dtype of an option; its parameters keep their dtype.

Next: `remat.py`, another option of a strategy that changes a model; `train_step/state.py`, which float16
needs.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.model import Model, wrap_functions
from shardtrain.functional.nnx_model import convert_model


def set_compute_dtype(model: Any, dtype: str | None) -> Any:
    """Return a model that computes in a dtype.

    Args:
      model: see `convert_model`. A dataclass with a field `dtype` gets the value. The float32 parameters and
        inputs of any other model are cast before a call, and its outputs to float32 after it. A layer that
        was made with a dtype of its own keeps it.
      dtype: float32, bfloat16 or float16; None leaves the model as it is.

    Raises:
      ValueError: the model refuses the value.
    """
    if dtype is None:
        return model
    if has_dtype(model):
        return replace(model, dtype=dtype if isinstance(model.dtype, str) else jnp.dtype(dtype))
    pure, narrow = convert_model(model), jnp.dtype(dtype)

    def wrap(function: Callable[..., Any], returns_outputs: bool) -> Callable[..., Any]:
        def call(params: Any, model_state: Any, rng: Any, train: bool, *inputs: Any) -> tuple[Any, Any]:
            params, inputs = _cast((params, inputs), jnp.dtype(jnp.float32), narrow)
            outputs, state = function(params, model_state, rng, train, *inputs)
            # statistics keep their dtype, which a step must not change
            state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, model_state)
            return _cast(outputs, narrow, jnp.dtype(jnp.float32)) if returns_outputs else outputs, state

        return call

    return wrap_functions(pure, wrap)


def has_dtype(model: Any) -> bool:
    """Return whether a model is a configuration with a field for its compute dtype."""
    if not is_dataclass(model) or isinstance(model, Model | type):
        return False
    return any(field.name == "dtype" and field.init for field in fields(model))


def _cast(tree: Any, before: Any, after: Any) -> Any:
    """Cast the arrays of one dtype to another; leave all other values."""
    return jax.tree.map(lambda x: x.astype(after) if getattr(x, "dtype", None) == before else x, tree)
