"""Plan one pipeline over islands, each of which is a stage with a mesh of its own, cut by time.

The alternative, islands as replicas, is `islands.py`. The cut and the costs of its stages are those of a run
with `--across pipeline --stages time`; speeds are what the planner predicts for the model on each island.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from shardtrain import axes
from shardtrain.pipeline.block_costs import model_costs
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import StageCosts, StageDevices
from shardtrain.pipeline.stage_cut import NoCut, best_cut
from shardtrain.plan.islands import ClusterPlan
from shardtrain.plan.machine import Machine
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.search import predictions
from shardtrain.plan.space import Space, allowed_remats
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import divisors

PER_STAGE = (1, 2, 4)
"""Microbatches for each stage that are tried, rounded down to what divides the batch."""


@dataclass(frozen=True, kw_only=True)
class StagesPlan:
    """A pipeline over islands.

    Args:
      counts: blocks of each island.
      accumulate: number of microbatches.
      compute_seconds: of the slowest stage in a step.
      bubble_seconds: that it waits.
      collectives_seconds: over the devices of the island of which that takes longest.
      update_seconds: likewise of the optimizer.
      memory_bytes: of a device of each island.
    """

    counts: tuple[int, ...]
    accumulate: int
    compute_seconds: float
    bubble_seconds: float
    collectives_seconds: float
    update_seconds: float
    memory_bytes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute_seconds + self.bubble_seconds + self.collectives_seconds + self.update_seconds


def plan_stages(subjects: Sequence[Subject], plan: ClusterPlan, space: Space | None = None) -> StagesPlan:
    """Return the best pipeline with a stage on each island, in the order of the cluster file.

    Inside an island examples are split over its devices. Parameters of a stage are whole on each of them.

    Args:
      subjects: of each kind of islands, as for `plan_cluster`.
      plan: the plan of islands as replicas; it says the machine of each kind.
      space: what may be chosen, for its rules and recomputation; None: everything.

    Raises:
      ValueError: the model does not say its blocks, or there are fewer than islands; no number of
        microbatches can be split over the devices; or no cut fits the memory.
    """
    subject, num_islands = subjects[0], len(plan.shares)
    chain = subject.model_of(None).chain
    if chain is None:
        raise ValueError(
            "the model does not say what its blocks are; give it `blocks` (docs/pipeline.md), or let"
            " --across pipeline cut it by tracing"
        )
    if chain.num_blocks < num_islands:
        raise ValueError(
            f"{chain.num_blocks} blocks cannot be cut into {num_islands} stages, one for each island; use at"
            f" most {chain.num_blocks} islands"
        )
    rows, devices = subject.batch_rows, [each.kind.devices or 1 for each in plan.kinds]
    tried = {max(n for n in divisors(rows) if n <= k * num_islands) for k in PER_STAGE}
    possible = [n for n in sorted(tried) if all(rows // n % each == 0 for each in devices)]
    if not possible:
        raise ValueError(
            f"a microbatch of {', '.join(str(rows // n) for n in sorted(tried))} rows cannot be split over"
            f" {' and '.join(map(str, devices))} devices; use a larger batch"
        )
    found, problem = [], None
    for number in possible:
        try:
            found.append(_of_microbatches(subjects, plan, space or Space(), number))
        except NoCut as error:
            problem = problem or error
    if not found:
        assert problem is not None
        raise problem
    return min(found, key=lambda each: each.seconds)


def _of_microbatches(subjects: Sequence[Subject], plan: ClusterPlan, space: Space, number: int) -> StagesPlan:
    """Return the best cut for so many microbatches."""
    subject = subjects[0]
    model, rows = subject.model_of(None), subject.batch_rows // number
    microbatch = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in subject.batch.items()
    }
    stages, whole = [], []
    for each, own in zip(plan.kinds, subjects, strict=True):
        prediction = _whole_model(own, each.kind.devices or 1, each.machine, space, number)
        devices = each.kind.devices or 1
        stage = StageDevices(
            flops_per_second=devices * prediction.flops / prediction.seconds.compute,
            memory_bytes=each.machine.rates.memory_bytes,
            row_shards=devices,
        )
        stages += [stage] * each.kind.count
        whole += [prediction] * each.kind.count
    costs = StageCosts(
        model=model_costs(Traced(model, subject.loss, microbatch), subject.optimizer.init),
        devices=stages,
        table=make_table("1f1b", len(stages), number),
        link_bytes_per_second=plan.link_bytes_per_second,
    )
    cut = best_cut(costs)
    parts = [count / costs.num_blocks for count in cut.counts]
    busy = number * max(cut.busy_seconds)
    return StagesPlan(
        counts=cut.counts,
        accumulate=number,
        compute_seconds=busy,
        bubble_seconds=cut.simulated.makespan - busy,
        collectives_seconds=max(
            part * sum(each.seconds.collectives.values()) for part, each in zip(parts, whole, strict=True)
        ),
        update_seconds=max(part * each.seconds.update for part, each in zip(parts, whole, strict=True)),
        memory_bytes=cut.memory_bytes,
    )


def _whole_model(subject: Subject, devices: int, machine: Machine, space: Space, number: int) -> Prediction:
    """Predict the model on one island, in whose proportion a stage of it is as fast."""
    layout = replace(space.layout, mesh={axes.DATA: devices}, sequence_sharded=False)
    remat = allowed_remats(subject, space)[0]
    choice = Choice(layout=layout, accumulate=number, remat=remat)
    (found,) = predictions(subject, machine, devices, [choice])
    return found
