"""The costs of a run's blocks, traced for the rows of its microbatches. Next: `stage_cut.py`."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from shardtrain.optim.optimizer import make_optimizer
from shardtrain.pipeline.block_costs import model_costs
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import ModelCosts, StageCosts, StageDevices
from shardtrain.plan.devices import GB
from shardtrain.trainer.config import Run, model_of
from shardtrain.trainer.setup import microbatch_of

TIME_NEEDS_BLOCKS = (
    "stages is 'time', and the model does not say its blocks, whose times are predicted; use --stages flops,"
    " by which any model is cut, or give it `blocks` (docs/pipeline.md)"
)


def block_costs(run: Run, source: Any, num_replicas: int) -> ModelCosts:
    """Return the costs of a run's blocks, for the rows of one replica's microbatch.

    Raises:
      ValueError: the model does not say what its blocks are.
    """
    traced = trace(run, source, num_replicas)
    model = model_of(run)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims, frozen=model.frozen)
    return model_costs(traced, optimizer.init)


def trace(run: Run, source: Any, num_replicas: int, row_shards: int = 1) -> Traced:
    """Return the traced functions of a run's model, for the rows of one replica's microbatch on a device.

    Raises:
      ValueError: the model does not say what its blocks are.
    """
    model = model_of(run)
    if model.chain is None:
        raise ValueError(TIME_NEEDS_BLOCKS)
    rows = max(run.batch // run.strategy.accumulate // num_replicas // row_shards, 1)
    batch = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in microbatch_of(run, source).items()
    }
    return Traced(model, run.loss, batch)


def stage_costs(run: Run, model: ModelCosts, stages: Sequence[StageDevices]) -> StageCosts:
    """Return the costs of a run's blocks on these stages.

    Raises:
      ValueError: the schedule has several parts a stage, or there are too few blocks.
    """
    pipeline = run.strategy.pipeline
    return StageCosts(
        model=model,
        devices=stages,
        table=make_table(pipeline.schedule, len(stages), run.strategy.accumulate, pipeline.virtual_stages),
        link_bytes_per_second=math.inf if pipeline.link_speed is None else pipeline.link_speed * GB,
    )
