"""What islands send after each program of their gradients, found by tracing a run without devices."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.train_step.gradient_pieces import PlannedParts
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_gradients import plan_parts
from shardtrain.trainer.config import Run
from shardtrain.trainer.setup import make_setup, microbatch_of


def sent_parts(run: Run, source: Any, sizes: Mapping[str, int]) -> PlannedParts:
    """Return what an island of a run sends after each program of `--gradient-parts`, and when.

    Args:
      run: the run; its strategy is that of island 0, whose parts all islands send.
      source: its training samples, of which one is loaded.
      sizes: axis -> size of the mesh of an island.
    """
    rows = microbatch_of(run, source)
    # where the optimizer's state is kept changes no gradient, and needs devices
    on_device = replace(run, strategy=replace(run.strategy, offload="none"))
    parts = make_setup(on_device, num_islands=2, microbatch=rows, mesh=abstract_mesh(sizes))
    across = run.strategy.across
    return plan_parts(
        make_gradients(parts.model, run.loss, parts.placement, mean=False),
        parts.placement,
        run.strategy.synchronisation,
        across.reduce_dtype,
        across.num_gradient_programs,
        {name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in rows.items()},
    )
