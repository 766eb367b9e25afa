"""Compute the loss and gradients of a few rows, and compare them with the sum over parts of these rows.

`row_coupling.py` finds operations that couple rows. Others may undo them, as a count undoes a mean, and some
are unknown to it.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.functional.float_gradients import value_and_grad
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key
from shardtrain.functional.traced_loss import ONE, trace_loss
from shardtrain.jaxpr.forward import evaluate
from shardtrain.system.xla_flags import quick_options

ROWS, PARTS, TRIALS = 9, 3, 5
MOST_BYTES = 256 << 20
"""Largest parameters of a model that is computed on one device before the first step."""
TINY = float(np.finfo(np.float32).tiny)


def compute_row_difference(
    model: Model,
    loss: Loss,
    batch: Mapping[str, np.ndarray],
    *,
    train: bool = True,
    num_trials: int = TRIALS,
    most_flops: float = math.inf,
) -> float | None:
    """Return the largest relative difference between a few rows and the sum of their parts; 1e-3 is 0.1 %.

    The sum and the count of the loss are compared, and its gradients. None for a model that is too large,
    calls Python, cannot take these numbers of rows, or gives NaN.

    Args:
      model: the whole model.
      loss: the loss function of the run.
      batch: rows of the run on the host, from which some are chosen.
      train: compute the loss of training and its gradients, or else the loss of held-out data.
      num_trials: number of choices of rows; in the first one a part has weights of 0.
      most_flops: largest program of all rows that is computed.
    """
    shapes = jax.tree.leaves(jax.eval_shape(model.init, new_key(0)))
    if sum(x.size * x.dtype.itemsize for x in shapes) > MOST_BYTES:
        return None
    options = quick_options(jax.default_backend())
    params, model_state = jax.jit(model.init, compiler_options=options)(new_key(0))
    # parameters that begin at zero would hide what they multiply
    params = jax.tree.map(_move, params)
    worst = 0.0
    with jax.sharding.use_abstract_mesh(ONE):
        try:
            whole, parts = (
                _compile(model, loss, (params, model_state, _chosen(batch, 0)), size, train, most_flops)
                for size in (ROWS, ROWS // PARTS)
            )
            # parts may be equal by chance, such as in the number of rows of each class
            for trial in range(num_trials):
                # a model may behave differently once it has counted its steps
                state, rows = (
                    jax.tree.map(partial(_count, 1000 * trial), model_state),
                    _chosen(batch, trial),
                )
                both = zip(whole(params, state, rows), map(np.array, parts(params, state, rows)), strict=True)
                for (total,), each in both:
                    size = np.abs(each).sum(0).max()
                    worst = np.maximum(worst, np.abs(total - each.sum(0)).max() / np.maximum(size, TINY))
        except Exception:  # of any code of the model: then it is not known
            return None
    return float(worst) if np.isfinite(worst) else None


def _chosen(batch: Mapping[str, np.ndarray], trial: int) -> dict[str, np.ndarray]:
    """Return some rows of a batch; in the first trial a part of them has weights of 0, as padding has."""
    random, size = np.random.default_rng(trial), len(next(iter(batch.values())))
    chosen = random.choice(size, ROWS, replace=size < ROWS)
    rows = {name: np.asarray(x)[chosen] for name, x in batch.items()}
    if trial == 0 and "weights" in rows:
        rows["weights"][: ROWS // PARTS] = 0
    return rows


def _compile(
    model: Model, loss: Loss, example: tuple[Any, Any, Any], size: int, train: bool, most_flops: float
) -> Callable[..., Any]:
    """Return (params, model state, rows) -> sums, counts and gradients of the parts of `size` rows.

    Raises:
      ValueError: the program calls Python, or takes more than `most_flops`.
    """
    program = trace_loss(model, loss, example[2], size, train)
    if program.effects:
        raise ValueError("it calls Python, which may count its calls")

    def sums(params: Any, state: Any, key: jax.Array, part: Any) -> Any:
        total, count, *_ = evaluate(program, jax.tree.leaves((key, params, state, part)))
        return total, count

    def inputs(params: Any, state: Any, rows: Mapping[str, np.ndarray], start: int = 0) -> Any:
        part = {name: x[start : start + size] for name, x in rows.items()}
        return params, state, row_key(new_key(0), start, size, model.draws), part

    compute = value_and_grad(sums) if train else lambda *given: (sums(*given), ())
    lowered = jax.jit(compute, compiler_options=quick_options(jax.default_backend())).lower(
        *inputs(*example, 0)
    )
    if (lowered.cost_analysis() or {}).get("flops", 0) > most_flops:
        raise ValueError("it takes too long")
    compiled = lowered.compile()

    def of_parts(*given: Any) -> Any:
        found = []
        for start in range(0, ROWS, size):
            (total, count), grads = compiled(*inputs(*given, start=start))
            entries = [np.ravel(x) for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.floating)]
            found.append((np.float64(total), np.float64(count), np.concatenate([[0.0], *entries])))
        return zip(*found, strict=True)

    return of_parts


def _count(steps: int, x: jax.Array) -> jax.Array:
    """Return an array of a model's state after some steps, if it counts them."""
    return x + steps if jnp.issubdtype(x.dtype, jnp.signedinteger) else x


def _move(x: jax.Array) -> jax.Array:
    """Change each entry of an array a little, each by another number."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x + 0.05 * jnp.sin(1 + 1.37 * jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)
