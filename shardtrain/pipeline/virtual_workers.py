"""Predict virtual workers: pipelines of unequal devices of a pool, each in its best order and cut. No jax.

`search` tries all allocations of the pool's devices; the policies are in `device_pool.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardtrain.pipeline.device_pool import POLICIES, Pool, Workers, all_allocations
from shardtrain.pipeline.stage_costs import ModelCosts, StageCosts
from shardtrain.pipeline.stage_cut import NoCut, StageCut, best_order
from shardtrain.pipeline.table import Table

MOST_ALLOCATIONS = 20_000
"""So many allocations are searched."""


@dataclass(frozen=True, kw_only=True)
class VirtualWorker:
    """A pipeline of several devices.

    Args:
      groups: for each stage, the number of the group that its device is of.
      cut: the blocks of each stage, and what is predicted.
      rows_per_second: without synchronisation.
    """

    groups: tuple[int, ...]
    cut: StageCut
    rows_per_second: float

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each block, the group of the device that owns it."""
        return tuple(
            group for group, count in zip(self.groups, self.cut.counts, strict=True) for _ in range(count)
        )


class WorkerPredictor:
    """Predicts virtual workers; each composition is cut once.

    Args:
      pool: the devices.
      model: costs of the blocks, for a microbatch.
      table: number of stages -> the schedule.
      rows: of a microbatch.
      recomputes: see `StageCosts`.
    """

    def __init__(
        self,
        pool: Pool,
        model: ModelCosts,
        table: Callable[[int], Table],
        rows: int,
        *,
        recomputes: bool = True,
    ) -> None:
        self.pool, self.model, self._table = pool, model, table
        self._rows, self._recomputes = rows, recomputes
        self._found: dict[tuple[int, ...], VirtualWorker | None] = {}

    def worker(self, groups: tuple[int, ...]) -> VirtualWorker | None:
        """Return a virtual worker of devices of these groups, in the best order; None where none fits.

        Args:
          groups: numbers of groups, sorted.
        """
        if groups not in self._found:
            self._found[groups] = self._predict(groups)
        return self._found[groups]

    def _predict(self, groups: tuple[int, ...]) -> VirtualWorker | None:
        if len(groups) > len(self.model.blocks):
            return None
        costs = StageCosts(
            model=self.model,
            devices=[self.pool.groups[group].device for group in groups],
            table=self._table(len(groups)),
            recomputes=self._recomputes,
        )
        try:
            cut = best_order(costs, lambda a, b: self.pool.link(groups[a], groups[b]), names=groups)
        except NoCut:
            return None
        rows = self._rows * costs.table.num_microbatches
        return VirtualWorker(
            groups=tuple(groups[number] for number in cut.order),
            cut=cut,
            rows_per_second=rows / cut.simulated.makespan,
        )


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Virtual workers, and the throughput of all of them together.

    Args:
      name: the policy.
      workers: the virtual workers.
      synchronisation_seconds: of the gradients of one step, see `synchronisation_seconds`.
      step_seconds: of the pipelines in a step, without it.
      rows_per_second: all together, where each has rows in proportion to its speed.
      equal_rows_per_second: where all have as many rows, and wait for the slowest.
    """

    name: str
    workers: tuple[VirtualWorker, ...]
    synchronisation_seconds: float
    step_seconds: float
    rows_per_second: float
    equal_rows_per_second: float


def allocation(
    name: str, workers: Workers, predictor: WorkerPredictor, gradient_bytes: Sequence[float]
) -> Allocation | None:
    """Predict an allocation; None if one of its virtual workers fits no cut into its memory.

    A step is as long as the mean of the workers' steps with equal rows, rows being in proportion to speed;
    then gradients are synchronised, without overlap.

    Args:
      name: its name.
      workers: the groups of each virtual worker.
      predictor: of the pool and model.
      gradient_bytes: of each block; those of the model's ends are part of the first and last block.
    """
    found = [predictor.worker(tuple(sorted(groups))) for groups in workers]
    if not all(found):
        return None
    made = tuple(worker for worker in found if worker is not None)
    sent = synchronisation_seconds(made, predictor.pool, gradient_bytes)
    total, slowest = sum(each.rows_per_second for each in made), min(each.rows_per_second for each in made)
    makespans = [each.cut.simulated.makespan for each in made]
    # rows in proportion to speed: all take as long, for as many rows as equal shares have together
    rows = made[0].rows_per_second * makespans[0] * len(made)
    step = rows / total
    return Allocation(
        name=name,
        workers=made,
        synchronisation_seconds=sent,
        step_seconds=step,
        rows_per_second=rows / (step + sent),
        equal_rows_per_second=rows / (rows / len(made) / slowest + sent),
    )


def synchronisation_seconds(
    workers: Sequence[VirtualWorker], pool: Pool, gradient_bytes: Sequence[float]
) -> float:
    """Return the seconds of an all-reduce of each block's gradients among its owners, one in each worker.

    A ring of W owners sends 2 (W - 1) / W of the bytes from each; owners of one node are neighbours in it, so
    that a node sends them once. Nodes send at the same time, and so do devices inside a node.
    """
    if len(workers) < 2:
        return 0.0
    factor = 2 * (len(workers) - 1) / len(workers)
    by_node: dict[str, float] = {}
    inside: dict[tuple[int, int], float] = {}
    for block, num_bytes in enumerate(gradient_bytes):
        owners = [worker.owners[block] for worker in workers]
        nodes = {pool.groups[owner].node for owner in owners}
        if len(nodes) > 1:
            for node in nodes:
                by_node[node] = by_node.get(node, 0.0) + factor * num_bytes
        else:
            for number, owner in enumerate(owners):
                inside[number, owner] = inside.get((number, owner), 0.0) + factor * num_bytes
    return max(
        max(by_node.values(), default=0.0) / pool.network_bytes_per_second,
        max(inside.values(), default=0.0) / pool.node_bytes_per_second,
    )


def search(
    predictor: WorkerPredictor, num_workers: int, gradient_bytes: Sequence[float], *, equal_rows: bool = False
) -> Allocation:
    """Return the allocation of all devices to equally many a worker with the highest predicted throughput.

    All allocations are predicted, each worker with the best order and cut for itself.

    Args:
      predictor: of the pool and model.
      num_workers: number of virtual workers.
      gradient_bytes: see `allocation`.
      equal_rows: whether all workers get as many rows.

    Raises:
      ValueError: the devices do not make so many equal workers, there are too many allocations, or none fits.
    """
    pool = predictor.pool
    total = sum(group.number for group in pool.groups)
    if num_workers < 1 or total % num_workers:
        divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise ValueError(
            f"{total} devices do not make {num_workers} virtual workers of equal size; use"
            f" {', '.join(divisors)}"
        )
    best = None
    remaining = tuple(group.number for group in pool.groups)
    for number, workers in enumerate(all_allocations(remaining, total // num_workers)):
        if number >= MOST_ALLOCATIONS:
            raise ValueError(
                f"there are more than {MOST_ALLOCATIONS:,} allocations of {total} devices to {num_workers}"
                f" virtual workers; use a policy ({', '.join(POLICIES)}), or fewer kinds of devices"
            )
        found = allocation("search", workers, predictor, gradient_bytes)
        if found is not None and (best is None or _judge(found, equal_rows) > _judge(best, equal_rows)):
            best = found
    if best is None:
        raise ValueError(
            f"no allocation of {total} devices to {num_workers} virtual workers fits their memory; use fewer"
            " virtual workers, with more devices each, or smaller microbatches"
        )
    return best


def _judge(found: Allocation, equal_rows: bool) -> float:
    return found.equal_rows_per_second if equal_rows else found.rows_per_second
