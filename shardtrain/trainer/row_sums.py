"""Whether sum, count and gradients of a loss over rows are those of its parts, computed with a few rows.

`row_coupling.py` finds operations between rows; others may undo them, as a count undoes a mean.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from shardtrain.functional.float_gradients import value_and_grad
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key
from shardtrain.functional.traced_loss import ONE, trace_loss
from shardtrain.system.xla_flags import quick_options

ROWS, PARTS, TRIALS = 9, 3, 5
MOST_BYTES = 256 << 20
"""Of the parameters of a model with which a few rows are computed on one device before the first step."""
TOLERANCE = 1e-5


def sums_add_up(model: Model, loss: Loss, batch: Mapping[str, np.ndarray]) -> bool:
    """Return whether the rows of a batch have the sum, the count and the gradients of their parts.

    False for a model that is too large to try, calls Python, or does not take so few rows.

    Args:
      model: the whole model.
      loss: the loss function of the run.
      batch: rows of the run on the host, of which some are computed.
    """
    shapes = jax.tree.leaves(jax.eval_shape(model.init, new_key(0)))
    if sum(x.size * x.dtype.itemsize for x in shapes) > MOST_BYTES:
        return False
    options = quick_options(jax.default_backend())
    params, model_state = jax.jit(model.init, compiler_options=options)(new_key(0))
    # what begins at zero would hide what it multiplies
    params = jax.tree.map(_moved, params)

    def of_parts(number: int) -> Callable[[Mapping[str, np.ndarray]], Any]:
        size = ROWS // number
        program = trace_loss(model, loss, batch, size)
        if program.effects:
            raise ValueError("it calls Python, which may count its calls")
        traced = jaxpr_as_fun(program)

        def sums(params: Any, key: jax.Array, part: Any) -> Any:
            total, count, *_ = traced(*jax.tree.leaves((key, params, model_state, part)))
            return total, count

        compiled = jax.jit(value_and_grad(sums), compiler_options=options)

        def totals(rows: Mapping[str, np.ndarray]) -> Any:
            found = []
            for start in range(0, ROWS, size):
                part = {name: x[start : start + size] for name, x in rows.items()}
                (total, count), grads = compiled(params, row_key(new_key(0), start, size, model.draws), part)
                entries = [
                    np.ravel(x) for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.floating)
                ]
                found.append((np.float64(total), np.float64(count), np.concatenate(entries)))
            return zip(*found, strict=True)

        return totals

    random, size = np.random.default_rng(0), len(next(iter(batch.values())))
    with jax.sharding.use_abstract_mesh(ONE):
        try:
            whole, parts = of_parts(1), of_parts(PARTS)
            # parts may be alike by chance, such as in the number of rows of each class
            for trial in range(TRIALS):
                chosen = random.choice(size, ROWS, replace=size < ROWS)
                rows = {name: np.asarray(x)[chosen] for name, x in batch.items()}
                if trial == 0 and "weights" in rows:
                    # a part of padding alone
                    rows["weights"][: ROWS // PARTS] = 0
                for (total,), each in zip(whole(rows), map(np.array, parts(rows)), strict=True):
                    allowed = TOLERANCE * np.abs(each).sum(0).max()
                    if not np.abs(total - each.sum(0)).max() <= allowed:
                        return False
        except Exception:  # what it cannot show stays said
            return False
    return True


def _moved(x: jax.Array) -> jax.Array:
    """Return an array a little away from where it is, each entry otherwise."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x + 0.05 * jnp.sin(1 + 1.37 * jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)
