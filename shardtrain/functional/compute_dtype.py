"""Compute any model in the dtype that an option says; its parameters stay as they are.

Next: `remat.py`, another option of a strategy that changes a model; `train_step/loss_scale.py`, which float16
needs.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.model import Model
from shardtrain.functional.nnx_model import convert_model


def set_compute_dtype(model: Any, dtype: str | None) -> Any:
    """Return a model that computes in a dtype.

    Args:
      model: as for `convert_model`. A dataclass with a field `dtype` is given the value; of any other model
        parameters and inputs of float32 are cast before a call, and its outputs to float32 after it. A layer
        that was made with a dtype of its own keeps that.
      dtype: float32, bfloat16 or float16; None leaves the model as it is.

    Raises:
      ValueError: the model refuses the value.
    """
    if dtype is None:
        return model
    if has_dtype(model):
        return replace(model, dtype=dtype if isinstance(model.dtype, str) else jnp.dtype(dtype))
    pure, narrow = convert_model(model), jnp.dtype(dtype)

    def wrap(function: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
        def call(params: Any, model_state: Any, rng: Any, train: bool, *inputs: Any) -> tuple[Any, Any]:
            params, inputs = _cast((params, inputs), jnp.dtype(jnp.float32), narrow)
            outputs, state = function(params, model_state, rng, train, *inputs)
            # statistics keep their dtype, which a step must not change
            state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, model_state)
            return (_cast(outputs, narrow, jnp.dtype(jnp.float32)) if is_last else outputs), state

        return call

    chain = pure.chain
    if chain is not None:
        chain = replace(
            chain,
            first=wrap(chain.first, is_last=False),
            run=wrap(chain.run, is_last=False),
            last=wrap(chain.last, is_last=True),
        )
    return replace(pure, apply=wrap(pure.apply, is_last=True), chain=chain)


def has_dtype(model: Any) -> bool:
    """Return whether a model is the configuration of one, with a field for its compute dtype."""
    if not is_dataclass(model) or isinstance(model, Model | type):
        return False
    return any(field.name == "dtype" and field.init for field in fields(model))


def _cast(tree: Any, before: Any, after: Any) -> Any:
    """Cast the arrays of one dtype to another, and leave everything else."""
    return jax.tree.map(lambda x: x.astype(after) if getattr(x, "dtype", None) == before else x, tree)
