"""Loss and gradients of a model on a mesh, by the toolkit."""

import math
from typing import Any

import jax
import numpy as np
import optax
from unordered_collectives import find_unordered

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.model import BLOCKS
from shardtrain.functional.rng import step_key
from shardtrain.pipeline.stacking import Partition
from shardtrain.plan.hlo.rendezvous import permutes_in_branches
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.step import make_gradients


def compile_gradients(
    model, layout: Layout, batch, microbatches=1, *, counts=(), loss=next_token_loss, **options
) -> Any:
    """Return the compiled gradients of a loss, their arguments, and the stages or None.

    Args:
      model: of `from_nnx`.
      layout: on as many devices as its mesh has.
      batch: arrays (rows, ...) by name.
      microbatches: number of parts of the batch.
      counts: blocks of each stage.
      loss: of the batch.
      options: of `make_placement`.
    """
    mesh = make_mesh(layout, jax.devices()[: math.prod(layout.mesh.values())])
    stages = Partition(num_stages=len(counts), num_chunks=1, counts=counts) if counts else None
    placement = make_placement(model, optax.identity(), layout, mesh, stages=stages, **options)
    state = init_state(model, optax.identity(), placement, seed=7)
    rows = {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}
    rows = {name: jax.device_put(x, placement.batch) for name, x in rows.items()}
    arguments = state.params, state.model_state, step_key(state.seed, state.step), rows
    compute = jax.jit(make_gradients(model, loss, placement), compiler_options=placement.compiler_options)
    compiled = compute.lower(*arguments).compile()
    text = compiled.as_text() or ""
    assert (permutes_in_branches(text), find_unordered(text)) == ([], [])  # or it could wait for ever
    return compiled, arguments, stages


def compute_gradients(*arguments, **options) -> dict[str, Any]:
    """Return loss, count and gradients, blocks in the model's own order; see `compile_gradients`."""
    compiled, given, stages = compile_gradients(*arguments, **options)
    found = compiled(*given)
    grads = dict(found.grads)
    if stages is not None:
        grads[BLOCKS] = jax.tree.map(stages.restore_order, grads[BLOCKS])
    loss = {"loss": found.loss_sum / found.count, "count": found.count}
    return jax.tree.map(np.asarray, {**loss, **grads})
