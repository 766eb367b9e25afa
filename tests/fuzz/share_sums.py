"""The gradients of islands' shares of a batch, one after the other in one process, and their sum.

Next: `checked.py`.
"""

from typing import Any

import jax
import numpy as np
from case import Case

import shardtrain as st
from shardtrain.data.loader import batch_shard
from shardtrain.data.row_split import RowSplit, weigh
from shardtrain.functional.rng import step_key
from shardtrain.trainer.prepared_run import PreparedRun


def sum_shares(case: Case, prepared: PreparedRun, state: Any, host: dict[str, np.ndarray]) -> Any:
    """Return the gradient of the mean loss that islands with these shares of the rows would sum up.

    Args:
      case: its shares are rows of islands, one of which may be none.
      prepared: the run, whose mesh each island has.
      state: the state before the step.
      host: the whole batch.
    """
    run, setup, loader = prepared.run, prepared.setup, prepared.feed.loader
    split = RowSplit.of(setup.mesh.shape, loader.batch_axes, case.accumulate)
    # all islands have rows for the largest share, so that one program serves all
    capacity = split.pad_rows(max(case.shares))
    gradients = jax.jit(
        st.make_gradients(setup.model, run.loss, setup.placement, mean=False),
        compiler_options=setup.placement.compiler_options,
    )
    key, sums = step_key(state.seed, state.step), []
    for island in range(len(case.shares)):
        shard = batch_shard(
            case.shares, island, setup.mesh, loader.batch_axes, case.accumulate, capacity=capacity
        )
        rows = {name: x[shard.rows] for name, x in host.items()}
        rows["weights"] = weigh(rows["weights"], shard.real)
        batch = st.place(rows, setup.mesh, loader.batch_axes, case.accumulate)
        found = gradients(state.params, state.model_state, key, batch, np.uint32(shard.start))
        sums.append((found.count, found.grads))
    count, grads = jax.tree.map(lambda *parts: sum(parts), *sums)
    return jax.tree.map(lambda g: g / count, grads)
