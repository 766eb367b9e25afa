"""Check the result of a loss, and report its exceptions. Next: `loss.py`, the losses."""

from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.errors.messages import refuse
from shardtrain.errors.user_code import user_code
from shardtrain.functional.loss import Apply, Batch, Loss, find_evaluation_loss

RESERVED = ("loss", "loss_sum", "count", "grad_norm", "skipped", "learning_rate")
"""Names of metrics that the step logs itself."""


def check_result(result: Any) -> tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Return the result of a loss as (sum, count, metrics).

    Raises:
      ValueError: lists all problems of a result that is not (sum, count) or (sum, count, metrics).
    """
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(
            f"the loss returned {_kind(result)}; return (sum, count), or (sum, count, metrics):"
            " the sum over examples or tokens, never the mean, and how many there are"
        )
    loss_sum, count = result[:2]
    metrics = result[2] if len(result) == 3 else {}
    problems = [
        f"{name} is {_kind(value)}, not a scalar"
        for name, value in (("sum", loss_sum), ("count", count))
        if jnp.shape(value) != ()
    ]
    if not problems and not jnp.issubdtype(jnp.result_type(loss_sum), jnp.floating):
        problems.append(
            f"sum is {jnp.result_type(loss_sum)}, which has no gradient; return a float, as by"
            " .astype('float32') before what depends on the parameters is rounded"
        )
    for name, pair in metrics.items():
        if name in RESERVED:
            problems.append(f"metric {name!r} has a name that the step uses; use another")
        if not isinstance(pair, tuple) or len(pair) != 2 or any(jnp.shape(x) != () for x in pair):
            problems.append(f"metric {name!r} is {_kind(pair)}; give (sum, count), two scalars")
    refuse("the result of the loss cannot be added up", problems)
    return loss_sum, count, metrics


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return f"an array of shape {value.shape}" if hasattr(value, "shape") else type(value).__name__


def guard_loss(loss: Loss) -> Loss:
    """Return a loss whose exceptions are reported with the shapes of its batch.

    Raises:
      UserCodeFailed: (when called) the loss raised an exception.
    """

    def where(error: BaseException, batch: Batch) -> str:
        name = getattr(loss, "__name__", type(loss).__name__)
        return f"the loss {name}, given a batch of {batch_text(batch)},"

    @wraps(loss)
    def call(apply: Apply, batch: Batch) -> tuple[Any, ...]:
        with user_code(lambda error: where(error, batch)):
            return loss(apply, batch)

    vars(call)["guarded"] = loss
    plain = find_evaluation_loss(loss)
    if plain is not loss:
        vars(call)["for_evaluation"] = guard_loss(plain)
    return call


def batch_text(batch: Batch) -> str:
    """Format the arrays of a batch: names, dtypes and shapes.

    >>> batch_text({"tokens": jnp.zeros((2, 3), jnp.int32)})
    "'tokens' int32 (2, 3)"
    """
    return ", ".join(f"{name!r} {x.dtype} {jnp.shape(x)}" for name, x in batch.items())
