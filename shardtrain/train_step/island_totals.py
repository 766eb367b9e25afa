"""Reduce loss sums and the model state over islands. Next: `island_step.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.combine import make_combiner
from shardtrain.functional.model import path_text
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.state import Metrics


def _reduce(arrays: Any, group: Any) -> Any:
    """Add up the sums, and average the model state by count; take integers from island 0."""
    sums, model_state, count = arrays
    leaves, structure = jax.tree.flatten(sums)
    added = group.all_reduce(jnp.stack(leaves))
    floats = {
        path_text(path): x
        for path, x in jax.tree.leaves_with_path(model_state)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }
    merged = make_combiner("mean").combine(floats, count, (), group).value if floats else {}

    def merge(path: Any, x: jax.Array) -> jax.Array:
        # if no island has examples there is no mean: the state stays
        found = merged.get(path_text(path))
        return group.broadcast(x) if found is None else jnp.where(group.all_reduce(count) > 0, found, x)

    model_state = jax.tree.map_with_path(merge, model_state)
    return jax.tree.unflatten(structure, list(added)), model_state


def all_reduce_totals(transfer: Transfer, sums: Any, model_state: Any, count: jax.Array) -> tuple[Any, Any]:
    """Reduce sums and the model state over islands.

    Args:
      transfer: to the other islands.
      sums: tree of float32 scalars, which are added up.
      model_state: the model state, which is averaged by the number of examples.
      count: float32 scalar, this island's examples.

    Returns:
      (sums, model_state) of all islands.
    """
    started = transfer.start(0, _reduce, (sums, model_state, count))
    return transfer.land(0, transfer.result(0, started), (sums, model_state))


def average_model_state(transfer: Transfer, model_state: Any, count: jax.Array) -> Any:
    """Average the model states of all islands by count; take integers from island 0."""
    if not jax.tree.leaves(model_state):
        return model_state
    return all_reduce_totals(transfer, count, model_state, count)[1]


def make_step_sums(metrics: Metrics) -> dict[str, Any]:
    """Return the sums that are added up over local steps; all but "skipped" are 0 in a skipped step."""
    skipped = metrics["skipped"]
    sums = {
        "loss_sum": metrics["loss_sum"],
        "count": metrics["count"],
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, tuple)},
        "squares": metrics["grad_norm"] ** 2,
        "steps": jnp.where(metrics["count"] > 0, 1.0, 0.0),
    }
    return {**jax.tree.map(lambda x: jnp.where(skipped > 0, 0, x), sums), "skipped": skipped}


def find_sum_shapes(metrics: Any) -> dict[str, Any]:
    """Return the shapes of `make_step_sums`, for a loss with these metrics."""
    zero = jax.ShapeDtypeStruct((), jnp.float32)
    names = ("loss_sum", "count", "grad_norm", "skipped")
    return jax.eval_shape(
        make_step_sums, {**jax.tree.map(lambda _: zero, metrics), **dict.fromkeys(names, zero)}
    )


def add_island_sums(metrics: Metrics, merged: Metrics, zeros: dict[str, Any]) -> Metrics:
    """Join the metrics of a local step and of its merge, with the loss of all islands if it is known.

    Args:
      metrics: the metrics of this island's step.
      merged: the metrics of its merge; "sums" has the sums of all islands since the last merge that had them.
      zeros: sums (see `make_step_sums`) of no steps.
    """
    sums = merged.pop("sums", None)
    if sums is None:
        return {**metrics, **select_loss_metrics(zeros), **merged}
    others = {
        "grad_norm": jnp.sqrt(sums["squares"] / jnp.maximum(sums["steps"], 1)),
        "skipped_by_islands": sums["skipped"],
    }
    return {**metrics, **select_loss_metrics(sums), **others, **merged}


def select_loss_metrics(sums: dict[str, Any]) -> Metrics:
    """Select the metrics of the loss from `make_step_sums`."""
    return {"loss_sum": sums["loss_sum"], "count": sums["count"], **sums["metrics"]}
