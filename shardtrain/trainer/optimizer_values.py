"""Values that an optax optimizer keeps in its state, such as the rate of `optax.inject_hyperparams`.

A checkpoint restores the state, so values changed in the code would be ignored: they are compared with those
at the start of the run that saved. Next: `resume.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardtrain.functional.model import path_text
from shardtrain.system.xla_flags import quick_options
from shardtrain.train_step.state import State

VALUES = "optimizer.values"
"""The field of the description of a run: path in the optimizer state -> value before the first step."""

INJECTED, OF_SCHEDULES = "/hyperparams/", "/hyperparams_states/"


def initial_values(optimizer: optax.GradientTransformation, params: Any) -> dict[str, float]:
    """Return the numbers in the state of an optimizer before the first step, by their paths.

    Args:
      optimizer: the optimizer.
      params: shapes of the parameters. Numbers of their own, and those that schedules give, are left out.
    """
    own = [path_text(path) for path, _ in jax.tree.leaves_with_path(params)]

    def numbers() -> dict[str, jax.Array]:
        state = optimizer.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
        leaves = {f"opt_state/{path_text(path)}": x for path, x in jax.tree.leaves_with_path(state)}
        scheduled = [path for path in leaves if OF_SCHEDULES in path]
        return {
            path: x
            for path, x in leaves.items()
            if x.ndim == 0
            and not jnp.issubdtype(x.dtype, jax.dtypes.extended)  # random keys
            and not any(path.endswith(f"/{name}") for name in own)
            and not any(each.startswith(path.replace(INJECTED, OF_SCHEDULES) + "/") for each in scheduled)
        }

    options = quick_options(jax.default_backend())
    found = jax.device_get(jax.jit(numbers, compiler_options=options)())
    return {path: float(x) for path, x in sorted(found.items())}


def with_new_values(
    state: State, saved: Mapping[str, Any], now: Mapping[str, Any], note: Callable[[str], None]
) -> State:
    """Return a restored state with the values that were changed since, where no step has changed them too.

    Args:
      state: the state.
      saved: description of the run that saved it.
      now: description of this run.
      note: receives a line for each value that differs.
    """
    new, old = now.get(VALUES) or {}, saved.get(VALUES) or {}

    def value(path: Any, x: Any) -> Any:
        name = path_text(path)
        if name not in new:
            return x
        (kept,) = set(np.unique(x.addressable_data(0)).tolist()) if x.size else {None}
        # checkpoints of earlier versions do not have it; what is injected does not change
        before = old.get(name, kept if INJECTED in name else new[name])
        if before == new[name]:
            return x
        if kept != np.asarray(before, x.dtype):
            note(
                f"WARNING: {name} is {new[name]:g} in the code, and was {before:g}; steps have made it"
                f" {kept:g} since, which is used"
            )
            return x
        note(f"{name} is {new[name]:g}, and was {before:g} in the checkpoint: the new value is used")
        return jax.device_put(jnp.full_like(x, new[name]), x.sharding)

    return jax.tree.map_with_path(value, state)
