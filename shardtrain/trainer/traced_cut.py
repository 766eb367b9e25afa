"""Trace the blocks of a model for pipeline stages: compute costs, measure speed, and format a traced cut.

Next: `stage_cut.py`.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.rng import new_key
from shardtrain.optim.optimizer import make_optimizer
from shardtrain.pipeline.block_costs import BACKWARD, model_costs
from shardtrain.pipeline.costs import ChainTrace
from shardtrain.pipeline.cuts import make_partitions
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.stage_costs import ModelCosts, StageCosts, StageDevices
from shardtrain.pipeline.traced_cut import ModelTrace
from shardtrain.plan.devices import GB
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.setup import make_microbatch

TIME_NEEDS_BLOCKS = (
    "stages is 'time', which predicts the times of blocks, and the model has no `blocks`; use --stages flops,"
    " which cuts any model, or give it `blocks` (docs/pipeline.md)"
)


def block_costs(run: Run, source: Any, num_replicas: int) -> ModelCosts:
    """Return the costs of a run's blocks, for the rows of one replica's microbatch.

    Raises:
      ValueError: the model has no blocks.
    """
    traced = trace(run, source, num_replicas)
    model = make_model(run)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims, frozen=model.frozen)
    return model_costs(traced, optimizer.init)


def trace(run: Run, source: Any, num_replicas: int, row_shards: int = 1) -> ChainTrace:
    """Trace the functions of a run's model, for the rows of one replica's microbatch on a device.

    Raises:
      ValueError: the model has no blocks.
    """
    model = make_model(run)
    if model.chain is None:
        raise ValueError(TIME_NEEDS_BLOCKS)
    rows = max(run.batch // run.strategy.accumulate // num_replicas // row_shards, 1)
    batch = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in make_microbatch(run, source).items()
    }
    return ChainTrace(model, run.loss, batch)


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


DEFAULT_STAGES = 2
"""The default number of stages to show."""


def format_traced_cut(traced: ModelTrace, stages: Partition) -> str:
    """Format a table of the parts of a model that was cut by tracing.

    Args:
      traced: the model.
      stages: the cut.
    """
    sizes = {path: x.size for path, x in traced.own_params().items()}
    rows, seen = [], set[str]()
    for part, count in enumerate(stages.counts):
        reads = [path for path in sizes if path in traced.part_paths(stages, part)]
        own = [path for path in reads if path not in seen]
        borrowed = [path for path in reads if path in seen]
        seen.update(reads)
        rows.append(
            (
                str(part),
                str(count),
                f"{sum(sizes[path] for path in own):,}",
                ", ".join(dict.fromkeys(own[:1] + own[-1:])),
                ", ".join(borrowed),
                ", ".join(traced.format_sent(stages, part)),
                bytes_text(traced.bytes_behind(stages, part)),
            )
        )
    header = ("part", "pieces", "parameters", "first and last", "borrowed", "sent on", "a row")
    text = f"the model has no `blocks` and is cut by tracing into {sum(stages.counts)} pieces"
    return f"{text}\n{table_text(header, rows)}"


def format_inspected_cut(run: Run, source: Any, num_stages: int | None) -> str:
    """Format the cut of a run across islands.

    Args:
      run: a run of a pipeline across islands, whose model has no blocks.
      source: its samples.
      num_stages: number of stages; by default the partitions of the run, or 2.

    Raises:
      ValueError: the model cannot be cut like this.
    """
    pipeline = run.strategy.pipeline
    num_stages = num_stages or run.strategy.across.partitions or DEFAULT_STAGES
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in make_microbatch(run, source).items()
    }
    traced = ModelTrace(make_model(run), run.loss, shapes)
    return format_traced_cut(traced, make_partitions(traced, pipeline, num_stages, 1)[0]).rstrip()


LEAST_RUNS, LEAST_SECONDS = 5, 1.0
"""Least runs and seconds of a block: a core that others use too is fast for a moment."""


def flops_per_second(traced: ChainTrace, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the flops per second of one local device, in the forward and backward of the costliest block.

    The block is compiled and run on arbitrary values, for the traced rows.

    Args:
      traced: the model's functions.
      clock: seconds.
    """
    costs = traced.costs("flops").blocks
    number = max(range(len(costs)), key=lambda i: costs[i])
    entering = traced.entering
    for before in range(0 if traced.chain.stacked else number):
        entering = jax.eval_shape(partial(traced.run, before), traced.block(before), entering)
    block, activations = jax.tree.map(_values, (traced.block(number), entering))
    leaves, structure = jax.tree.flatten(activations)
    is_float = [_is_float(x) for x in leaves]

    def total(block: Any, floats: list[jax.Array]) -> jax.Array:
        left = iter(floats)
        given = [next(left) if yes else x for x, yes in zip(leaves, is_float, strict=True)]
        found = jax.tree.leaves(traced.run(number, block, jax.tree.unflatten(structure, given)))
        return sum((jnp.square(x.astype(jnp.float32)).sum() for x in found if _is_float(x)), jnp.float32(0))

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))
    floats = [x for x, yes in zip(leaves, is_float, strict=True) if yes]
    jax.block_until_ready(gradients(block, floats))  # compiles
    runs, seconds, start = 0, 0.0, clock()
    while runs < LEAST_RUNS or seconds < LEAST_SECONDS:
        jax.block_until_ready(gradients(block, floats))
        runs, seconds = runs + 1, clock() - start
    return (1 + BACKWARD) * costs[number] * runs / seconds


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _values(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return random values that no operation skips and that do not overflow."""
    if not _is_float(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    return (0.02 * jax.random.normal(new_key(0), shape.shape)).astype(shape.dtype)
