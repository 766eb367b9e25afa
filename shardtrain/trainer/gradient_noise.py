"""Which runs can measure the gradient noise scale. Next: `train_step/gradient_noise.py`."""

import math
from typing import Any

from shardtrain.axes import PIPELINE
from shardtrain.train_step.placement import Placement


def noise_problems(run: Any) -> list[str]:
    """Return why a run cannot measure the gradient noise scale, one line each.

    Args:
      run: see `config.Run`.
    """
    if not run.gradient_noise_scale:
        return []
    synchronisation, given = run.strategy.synchronisation, "gradient_noise_scale is on, with"
    needs = (
        "whose result is not the mean of all examples' gradients, and its norm is needed; use --combine mean"
        " on gradients, with inside mean"
    )
    found = []
    if not synchronisation.is_mean:
        found.append(f"{given} combine {synchronisation.by!r} on {synchronisation.on}, {needs}")
    if synchronisation.inside != "mean":
        found.append(f"{given} inside {synchronisation.inside!r}, {needs}")
    if run.strategy.across.axis == PIPELINE:
        found.append(
            f"{given} across 'pipeline', where each stage knows the norms of its own parameters alone; use a"
            " pipeline inside a mesh (--mesh pipeline=2,data=2)"
        )
    return found


def check_noise(run: Any, placement: Placement, num_islands: int) -> None:
    """Check that a step adds up at least two gradients, from which the gradient noise scale is estimated.

    Args:
      run: see `config.Run`.
      placement: of an island.
      num_islands: number of islands.

    Raises:
      ValueError: it computes a single one.
    """
    if not run.gradient_noise_scale:
        return
    num_replicas = math.prod(placement.mesh.shape[axis] for axis in placement.layout.replica_axes)
    microbatches = run.strategy.accumulate if placement.stages is None else 1
    if num_replicas * microbatches * num_islands > 1:
        return
    add = "--mesh data=2" if placement.stages is not None else "--accumulate 2, or --mesh data=2"
    inside = " (a pipeline adds up its own)" if placement.stages is not None else ""
    raise ValueError(
        "gradient_noise_scale is on, which compares gradients of parts of a batch with that of all of it, and"
        f" a step has 1 island, 1 replica and 1 microbatch{inside}; use {add}, or leave it out"
    )
