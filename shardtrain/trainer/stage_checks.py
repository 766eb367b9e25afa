"""Check that islands or a mesh can hold the stages of a pipeline; each check lists all its problems.

Next: `setup.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardtrain.axes import LAYERS, PIPELINE
from shardtrain.errors.messages import refuse
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.separable import coupling_problems, order_problems, share_problems
from shardtrain.pipeline.cuts import Parts
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy

SCALED_PIPELINE = (
    "compute_dtype is 'float16', which needs a scaled loss, and a pipeline does not scale it; use bfloat16 or"
    " float32"
)

ROUNDED_PIPELINE = (
    "accumulate_dtype is 'bfloat16', and a pipeline adds up its microbatches in float32; use float32, or no"
    " pipeline"
)

HOST_INPUTS = (
    "remat is 'offload', and a pipeline keeps the inputs of its stages on the devices; use full, or no"
    " pipeline"
)

OFFLOADED_OWN = (
    "offload is 'optimizer', which needs islands that combine gradients in every step; use --offload none, or"
    " --synchronisation every-step without --across pipeline"
)

TRACED_CUTS = "the model has no `blocks`, so it is cut by tracing; use one cut for all"


def check_stage_islands(run: Run, mesh: Mesh) -> None:
    """Check the options of a run whose islands hold the stages of a pipeline.

    Raises:
      ValueError: lists all that do not go together.
    """
    strategy = run.strategy
    problems = []
    if mesh.shape[PIPELINE] > 1:
        problems.append(f"the mesh has pipeline={mesh.shape[PIPELINE]}; use pipeline=1 inside each island")
    if jax.process_count() > 1:
        problems.append(f"an island has {jax.process_count()} processes; use one each")
    problems += stage_problems(strategy)
    refuse("islands cannot hold the stages of a pipeline", problems)


def stage_problems(strategy: Strategy) -> list[str]:
    """Return the options of a strategy that do not work with islands as stages of a pipeline."""
    problems = []
    if (inside := strategy.synchronisation.inside) != "mean":
        problems.append(f"inside is {inside!r}; use mean, as a pipeline has one gradient for its rows")
    problems += pipeline_problems(strategy)
    if strategy.layout.operators:
        problems.append(
            "the layout has shardings of single operators, which stages do not follow; leave them out"
        )
    if strategy.offload != "none":
        problems.append(OFFLOADED_OWN)
    in_flight = strategy.pipeline.in_flight
    if in_flight > 1 and strategy.synchronisation.distance is None:
        problems.append(
            f"in_flight is {in_flight} batches, each a step of a pipeline's own optimizer, and there are no"
            f" waves; use --synchronisation wsp --local-steps {in_flight}, or in_flight 1"
        )
    return problems


def pipeline_problems(strategy: Strategy) -> list[str]:
    """Return the options of a strategy that do not work with any pipeline."""
    refused = {
        SCALED_PIPELINE: strategy.scales_loss,
        ROUNDED_PIPELINE: strategy.accumulate_dtype != "float32",
        HOST_INPUTS: strategy.remat == "offload",
    }
    return [text for text, is_there in refused.items() if is_there]


def check_cuts(run: Run, traced: Parts, cuts: Sequence[Partition], mesh: Mesh, *, has_blocks: bool) -> None:
    """Check that the model can be cut by the options of the run.

    Args:
      run: the run.
      traced: the parts of the model.
      cuts: the partition of each pipeline.
      mesh: the mesh of this island.
      has_blocks: whether the model has `blocks`.

    Raises:
      ValueError: lists why not.
    """
    in_flight = run.strategy.pipeline.in_flight
    if in_flight > 1 and jax.tree.leaves(traced.model_state):
        raise ValueError(
            f"in_flight is {in_flight} batches, and the model has a state (batch norm), which each changes"
            " for the next; use a norm without statistics (GroupNorm, LayerNorm), or in_flight 1"
        )
    if len(set(cuts)) > 1:
        refuse(
            f"pipelines cannot be cut differently ({run.strategy.pipeline.stages})",
            [
                *different_cut_problems(run, traced.model_state),
                *([] if has_blocks else [TRACED_CUTS]),
                *find_sharded_block_problems(run.strategy.layout, mesh),
            ],
        )


def check_separable(optimizer: Any, dims: Any, traced: Parts) -> None:
    """Check that stages can update their parameters separately with this optimizer.

    Raises:
      ValueError: lists the arrays of different stages that it couples.
    """
    if isinstance(optimizer, Optimizer):
        return
    shapes = traced.params
    refuse(
        "stages update their own parameters, which would not be the update of the whole model; use"
        " another optimizer (adamw, sgd, lion, muon), and Optimizer(clip=...) for clipping",
        coupling_problems(optimizer, dims, shapes) or share_problems(optimizer, dims, shapes),
    )


def check_order(optimizer: Any, dims: Any, params: Any, stages: Partition) -> None:
    """Check that an optimizer can update stacked blocks in the order in which a mesh stores them.

    Args:
      optimizer: the optimizer of the run, as it was given.
      dims: the dim names of the model.
      params: arrays or shapes.
      stages: the partition of the blocks.

    Raises:
      ValueError: its update depends on the order.
    """
    if isinstance(optimizer, Optimizer) or stages.is_plain:
        return
    refuse(
        "the mesh stores blocks in the order of its stages, padded with zeros if the cut is uneven, and"
        " this optimizer would update them differently in the model's own order; use another"
        " optimizer (adamw, sgd, lion, muon), or a cut in equal parts and one virtual stage",
        order_problems(optimizer, dims, params, stages.stored_blocks),
    )


def different_cut_problems(run: Run, model_state: Any) -> list[str]:
    """Return why the pipelines of a run must be cut alike."""
    problems, synchronisation = [], run.strategy.synchronisation
    if synchronisation.on_deltas:
        problems.append("replicas combine deltas; use --combine-on gradients, or one cut for all")
    if synchronisation.by not in ("mean", "sum"):
        problems.append(f"combine is {synchronisation.by!r}; use mean or sum, or one cut for all")
    if jax.tree.leaves(model_state):
        problems.append("the model has a state (batch norm), which is averaged by stage; use one cut for all")
    return problems


def find_sharded_block_problems(layout: Layout, mesh: Mesh) -> list[str]:
    """Return why the blocks of an island cannot have several owners: their dim is sharded in its mesh."""
    dim_axes = [axis for axis in layout.parameter_rules.get(LAYERS, ()) if mesh.shape[axis] > 1]
    if not dim_axes:
        return []
    return [f"the dim 'layers' is sharded over {dim_axes}; use the rule layers = [], or one cut for all"]
