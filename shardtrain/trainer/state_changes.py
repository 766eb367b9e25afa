"""Arrays of a model's state that change otherwise where a batch is split. Next: `loss_trace.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.dependencies import dependencies
from shardtrain.functional.model import path_text
from shardtrain.functional.traced_equations import equations
from shardtrain.trainer.row_coupling import NORMALIZATION


def state_warnings(
    traced: Any, model_state: Any, num_arrays: int, num_parts: int, num_microbatches: int
) -> list[str]:
    """Return a warning about arrays of the model's state that change otherwise where a batch is split.

    Args:
      traced: the program of a loss, see `trace_loss`.
      model_state: the state, of shapes.
      num_arrays: the number of arrays of a batch.
      num_parts: parts into which a batch is split, over replicas, microbatches and islands.
      num_microbatches: parts that one replica computes one after the other.
    """
    jaxpr, paths = traced.jaxpr, [path_text(path) for path, _ in jax.tree.leaves_with_path(model_state)]
    # behind the sum, the count and metrics; a loss need not call the model
    if not paths or len(jaxpr.outvars) < 2 + len(paths):
        return []
    before = jaxpr.invars[-num_arrays - len(paths) : -num_arrays]
    # the documents say so of batch norms and of routers
    known = ("router_bias", *(("mean", "var") if _has_batch_norm(traced) else ()))
    groups = [int(number >= len(jaxpr.invars) - num_arrays) for number in range(len(jaxpr.invars))]
    read_rows = dependencies(jaxpr, groups)[-len(paths) :]
    names = [
        path
        for path, old, new, reads_rows in zip(
            paths, before, jaxpr.outvars[-len(paths) :], read_rows, strict=True
        )
        if new is not old and (num_parts if reads_rows else num_microbatches) > 1
        # arrays that are attributes, which are kept as their bits
        if not jnp.issubdtype(old.aval.dtype, jnp.unsignedinteger)
        if path.split("/")[-1] not in known
    ]
    if not names:
        return []
    return [
        f"WARNING: a call of the model changes {', '.join(names)}; each of the {num_parts} parts of a batch,"
        " over replicas, microbatches and islands, changes it by its own rows, so losses are not those of one"
        " device (docs/models.md)"
    ]


def _has_batch_norm(traced: Any) -> bool:
    """Return whether a program has a batch norm of Flax, whose statistics are called mean and var."""
    traces = [each.equation.source_info.traceback for each in equations(traced)]
    return any(frame.file_name.endswith(NORMALIZATION) for trace in traces if trace for frame in trace.frames)
