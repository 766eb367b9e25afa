"""The sums of the loss of all pipelines, gathered from their last stages. Next: `stage_step.py`."""

from typing import Any

import jax
import numpy as np

from shardtrain.train_step.island_merge import AllGather
from shardtrain.train_step.seats import Seats


def gather_losses(
    name: str, loss_sums: dict[str, Any], seats: Seats, last_stage: int, all_gather: AllGather
) -> list[dict[str, Any]]:
    """Return the sums of the loss of each pipeline, on every rank.

    Args:
      name: the name of the all-gather.
      loss_sums: those of this pipeline, on its last stage.
      seats: which island has which stage.
      last_stage: the stage that computes the loss.
      all_gather: gathers a value of every rank, by name.
    """
    own = jax.tree.map(float, jax.device_get(loss_sums)) if seats.stage == last_stage else None
    found = all_gather(name, own)
    return [seats.of_replica(found, replica)[last_stage] for replica in range(seats.num_replicas)]


def sum_losses(by_replica: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the sums of the loss over pipelines, in their order: the same on every rank."""
    found = [{**x, "metrics": {name: tuple(pair) for name, pair in x["metrics"].items()}} for x in by_replica]
    return jax.tree.map(lambda *x: np.float32(sum(x)), *found)
