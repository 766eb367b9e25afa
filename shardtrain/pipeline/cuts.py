"""Cut a model into the parts of a pipeline, by its blocks or, without blocks, by tracing its program."""

from collections.abc import Mapping
from typing import Any

from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.pipeline.costs import NO_BLOCKS, ChainTrace
from shardtrain.pipeline.options import Pipeline
from shardtrain.pipeline.partition import counts, cut_narrowly, parse_cuts
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.traced_cut import ModelTrace

Parts = ChainTrace | ModelTrace
"""A traced model: its costs, and how to cut it and run a part."""


def trace_parts(model: Model, loss: Loss, microbatch: Mapping[str, Any]) -> Parts:
    """Trace a model by its blocks, or by its operations if it does not define blocks."""
    return (ModelTrace if model.chain is None else ChainTrace)(model, loss, microbatch)


def make_partition(
    model: Model, pipeline: Pipeline, num_stages: int, loss: Loss, microbatch: Mapping[str, Any]
) -> Partition:
    """Cut a model's blocks into the stages of a pipeline inside a mesh.

    Raises:
      ValueError: the model does not define its blocks; or see `make_partitions`.
    """
    if model.chain is None:
        raise ValueError(NO_BLOCKS)
    return make_partitions(ChainTrace(model, loss, microbatch), pipeline, num_stages, 1)[0]


def make_partitions(traced: Parts, pipeline: Pipeline, num_stages: int, num_replicas: int) -> list[Partition]:
    """Cut a model into the stages of each replica of a pipeline.

    Args:
      traced: the model.
      pipeline: says how to cut: all replicas alike, or each in its own way.
      num_stages: number of stages.
      num_replicas: number of pipelines.

    Raises:
      ValueError: the model cannot be cut like this; or there are neither one cut nor one for each replica.
    """
    ways = parse_cuts(pipeline.stages)
    if len(ways) not in (1, num_replicas):
        use = "; ".join(["one for all", *([f"{num_replicas}, one each"] if num_replicas > 1 else [])])
        pipelines = f"{num_replicas} pipeline{'' if num_replicas == 1 else 's'}"
        raise ValueError(
            f"stages {pipeline.stages!r} has {len(ways)} cuts, and there are {pipelines}; give {use}"
        )
    num_parts = num_stages * pipeline.virtual_stages
    cuts = [
        Partition(
            num_stages=num_stages,
            num_chunks=pipeline.virtual_stages,
            placement=pipeline.placement,
            counts=tuple(_counts(traced, by, num_parts)),
        )
        for by in ways
    ]
    return cuts * num_replicas if len(cuts) == 1 else cuts


def _counts(traced: Parts, by: str | tuple[int, ...], num_parts: int) -> list[int]:
    if isinstance(traced, ChainTrace):
        costs = traced.costs(by) if by in ("params", "flops") else None
        return counts(by, traced.num_blocks, num_parts, costs)
    traced.check(num_parts)
    if not isinstance(by, str) or by == "time":
        return counts(by, traced.num_blocks, num_parts)
    # pieces are of unlike size: an equal cut has equal work
    costs = traced.costs("flops" if by == "equal" else by)
    return cut_narrowly(costs.blocks, num_parts, traced.sent_bytes)
