"""A run's model and a cluster's devices as the pipeline that `replicated_stages.py` cuts."""

import math

import jax

from shardtrain.pipeline.block_costs import GRADIENT_BYTES, model_costs
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.partition import Costs
from shardtrain.plan.devices import GB
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.layers.replicated_costs import PipelineDevices, ReplicatedCosts, StageDevice
from shardtrain.plan.layers.replicated_stages import MOST_ENTRIES
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import divisors

MICROBATCHES = 4
"""Most microbatches for each stage that there can be."""


def pipeline_devices(plan: ClusterPlan, link_gb_per_second: float | None, num_blocks: int) -> PipelineDevices:
    """Return the devices of a planned cluster in order, kind by kind; of many, several of a node as one.

    The links are the slowest inside a node and between nodes or islands.

    Args:
      plan: what says each kind's devices and machine.
      link_gb_per_second: what an island sends to others; None: at once.
      num_blocks: of the model.
    """
    total = sum((each.kind.devices or 1) * each.kind.count for each in plan.kinds)
    most = max(math.isqrt(MOST_ENTRIES) // num_blocks, 1)
    devices, node = [], 0
    between = [] if link_gb_per_second is None or len(plan.shares) == 1 else [link_gb_per_second * GB]
    for each in plan.kinds:
        rates, of_island = each.machine.rates, each.kind.devices or 1
        per_node = min(each.machine.devices_per_node, of_island)
        # as few devices as one as leave few enough, or all that divide a node
        together = divisors(math.gcd(per_node, of_island))
        number = next((n for n in together if total <= n * most), together[-1])
        for _ in range(each.kind.count):
            devices += [
                StageDevice(
                    flops_per_second=rates.flops_per_second,
                    memory_bytes=rates.memory_bytes,
                    node=node + i // per_node,
                    number=number,
                )
                for i in range(0, of_island, number)
            ]
            node = devices[-1].node + 1
        if of_island > per_node:
            between.append(each.machine.node_link.bytes_per_second)
    inside = min(each.machine.device_link.bytes_per_second for each in plan.kinds)
    return PipelineDevices(
        devices=tuple(devices),
        device_bytes_per_second=inside,
        node_bytes_per_second=min(between, default=inside),
    )


def pipeline_costs(subject: Subject, plan: ClusterPlan, link_gb_per_second: float | None) -> ReplicatedCosts:
    """Return what stages of a run's model cost on a planned cluster, in microbatches of equal rows.

    Args:
      subject: the model, its loss, optimizer and batch.
      plan, link_gb_per_second: see `pipeline_devices`.

    Raises:
      ValueError: the model does not say what its blocks are.
    """
    model = subject.model_of(None)
    if model.chain is None:
        raise ValueError(
            "the model does not say what its blocks are; give it `blocks` (docs/pipeline.md), or let --across"
            " pipeline cut it by tracing"
        )
    devices = pipeline_devices(plan, link_gb_per_second, model.chain.num_blocks)
    stages = min(len(devices.devices), model.chain.num_blocks)
    # microbatches of equal rows, so that the costs are those of this batch and not of a padded one
    microbatches = max(n for n in divisors(subject.batch_rows) if n <= MICROBATCHES * stages)
    rows = subject.batch_rows // microbatches
    microbatch = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in subject.batch.items()
    }
    traced = Traced(model, subject.loss, microbatch)
    elements = traced.costs("params")
    return ReplicatedCosts(
        model=model_costs(traced, subject.optimizer.init),
        gradient_bytes=Costs(
            blocks=[GRADIENT_BYTES * each for each in elements.blocks],
            first=GRADIENT_BYTES * elements.first,
            last=GRADIENT_BYTES * elements.last,
        ),
        pipeline=devices,
        num_microbatches=microbatches,
        rows=rows,
    )
