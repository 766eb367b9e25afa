"""Run a pipeline inside a mesh: all stages scan over a table in lock-step, and exchange results in each tick.

The functions here run inside a shard_map that is manual over the axis pipeline, for one replica. The
backward pass is written by hand: a stage keeps the inputs of its microbatches and recomputes the rest, so
only the schedule decides how many are live. Next: `train_step/gradients.py`, which calls it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import BLOCKS, Chain
from shardtrain.functional.sums import Sums
from shardtrain.pipeline.activations import make_slots, put
from shardtrain.pipeline.mesh_stage import MeshStage
from shardtrain.pipeline.mesh_tasks import Branches, Carry, StageTasks, TickTask, order_after
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.table import KINDS, Table
from shardtrain.pipeline.tick_arrays import NONE, make_ticks


def run_pipeline(
    params: Any,
    rng: Callable[[Any], jax.Array],
    batch: Batch,
    *,
    chain: Chain,
    loss: Loss,
    stages: Partition,
    table: Table,
    specs: Any,
    row_axes: Sequence[str] = (),
) -> Sums:
    """Compute the sums of a batch by executing a table: losses, and gradients if it has backward tasks.

    Args:
      params: the parameters of this stage; `params["blocks"]` are its rows of the stacked blocks.
      rng: number of a microbatch -> the key of its rows.
      batch: every array (microbatches, rows, ...).
      chain: stacked blocks; their activations must have the same shapes between all blocks.
      loss: returns (sum, count), see `loss.Loss`.
      stages: the partition of the blocks.
      table: at most one task of each kind per stage and tick.
      specs: like params, the PartitionSpec of each gradient.
      row_axes: the mesh axes over which rows are sharded.

    Returns:
      The sums, equal on all stages except for the gradients of their own blocks.

    Raises:
      ValueError: the table is for another placement of parts, blocks change the shapes of activations, or
        the loss does not call the model once.
    """
    # blocks are stored for one placement; a table for another one would run them in a wrong order
    if table.part_placement != stages.part_placement:
        raise ValueError(
            f"schedule {table.name!r} is for {table.part_placement}, and the blocks are cut for"
            f" {stages.part_placement}; make the partition with placement={table.placement!r}, as"
            " pipeline.cuts.make_partition does"
        )
    # the computations of this stage, and the scan that carries out its column of the table
    compute = MeshStage(
        chain=chain,
        loss=loss,
        stages=stages,
        params=params,
        rng=rng,
        batch=batch,
        row_axes=row_axes,
        train="backward" in table.kinds,
    )
    return _TableScan(compute, table, specs, row_axes).sums()


class _TableScan:
    """The scan over the ticks of a table, on one stage.

    In a tick each of these waits for the previous one: permutes (all stages take part), forward, backward,
    weight. If two of them contained collectives and did not depend on each other, XLA's runtime for CPUs
    could run them in a different order on each device, which deadlocks (`plan.hlo.rendezvous`).
    """

    def __init__(self, compute: MeshStage, table: Table, specs: Any, row_axes: Sequence[str]) -> None:
        self.compute, self.table = compute, table
        # the pipeline axis is manual here, so no spec may name it
        grad_specs = jax.tree.map(partial(_remove_axes, {axes.PIPELINE}), specs) if compute.train else {}
        self.branches = Branches(compute, grad_specs)
        # what comes before the blocks is read whole over the axes of rows, too (see `StageTasks._first`)
        whole_specs = jax.tree.map(partial(_remove_axes, {axes.PIPELINE, *row_axes}), specs)
        self.tasks = StageTasks(compute, self.branches, table.has_weight, whole_specs)
        self.ticks = make_ticks(table)

    def sums(self) -> Sums:
        """Scan over all ticks, then add up over stages what only some of them computed."""
        # all stages run the same program: a row has the tasks of a tick, and each stage reads its own column
        columns = {name: jnp.asarray(column) for name, column in self.ticks.columns.items()}
        carry, _ = lax.scan(lambda carry, row: (self._tick(carry, row), None), self._initial(), columns)
        # gradients of blocks stay on their stage; the loss and everything outside the blocks is summed
        own = {name: grads for name, grads in carry.sums.grads.items() if name == BLOCKS}
        rest = {name: grads for name, grads in carry.sums.grads.items() if name != BLOCKS}
        sums = lax.psum(carry.sums._replace(grads=rest), axes.PIPELINE)
        return sums._replace(grads={**sums.grads, **own})

    def _initial(self) -> Carry:
        compute, shapes = self.compute, self.compute.tree.shapes
        cotangents = shapes.floats if compute.train else []
        loss_sum, (count, metrics) = compute.loss_shapes
        params = {**compute.rest, BLOCKS: compute.blocks} if compute.train else {}
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), Sums(loss_sum, count, metrics, params))
        # zeros: a task reads only slots that an earlier tick has filled
        return Carry(
            sent=_zeros(shapes),
            sent_back=_zeros(cotangents),
            inputs=make_slots(self.ticks.num_inputs, shapes),
            cotangents=make_slots(self.ticks.num_cotangents, cotangents),
            sums=self.branches.constrain(sums),
        )

    def _tick(self, carry: Carry, row: dict[str, jax.Array]) -> Carry:
        # a row has the numbers of all stages: select those of this stage
        mine = {name: lax.dynamic_index_in_dim(x, self.compute.stage, 0, False) for name, x in row.items()}
        forward, backward, weight = (self._task(mine, kind) for kind in KINDS)
        # permutes are outside all branches, as every stage takes part in every tick
        carry = self._receive(carry, mine, forward.never)
        carry = self.tasks.forward(forward, carry)
        if self.compute.train:
            carry = self.tasks.backward(backward, carry)
        return self.tasks.weight(weight, carry) if self.table.has_weight else carry

    def _receive(self, carry: Carry, mine: dict[str, jax.Array], never: jax.Array) -> Carry:
        """Permute what all stages computed in the last tick, and put what arrives here into its slots.

        Every stage sends over every hop of the placement; the table says which arrivals are kept. Each
        permute waits for the previous one, so that the forward, which reads the slots, waits for all of them.
        """
        before: list[Any] | None = None

        def ordered(floats: list[Any]) -> list[Any]:
            nonlocal before
            found = floats if before is None else order_after(floats, before, never)
            before = found if self.compute.train else None
            return found

        inputs, cotangents = carry.inputs, carry.cotangents
        for hop, pairs in self.table.part_placement.hops.items():
            # cotangents take the reverse way of activations
            reverse = tuple((to, origin) for origin, to in pairs)
            arrived_back = ordered(_permute(carry.sent_back, hop, reverse))
            arrived = _permute(carry.sent, hop, pairs)
            arrived = arrived._replace(floats=ordered(arrived.floats))
            inputs = put(inputs, arrived, mine[f"arriving_input_{hop}"])
            cotangents = put(cotangents, arrived_back, mine[f"arriving_cotangent_{hop}"])
        return carry._replace(inputs=inputs, cotangents=cotangents)

    def _task(self, mine: dict[str, jax.Array], kind: str) -> TickTask:
        # with one chunk per stage its number is static, and slices of the stage's blocks are all of them
        chunk = 0 if self.table.num_chunks == 1 else jnp.maximum(mine[f"{kind}_chunk"], 0)
        stage, is_present, placement = self.compute.stage, mine[kind] >= 0, self.table.part_placement
        return TickTask(
            never=mine[kind] < NONE,
            is_present=is_present,
            is_first=is_present & (stage == placement.stage(0)) & (chunk == 0),
            is_last=is_present & (stage == placement.last_stage) & (chunk == self.table.num_chunks - 1),
            microbatch=jnp.maximum(mine[kind], 0),
            chunk=chunk,
            input=mine[f"{kind}_input"],
            cotangent=mine[f"{kind}_cotangent"],
        )


def _permute(arrays: Any, hop: int, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send arrays along the pipeline axis; a hop of 0 sends nothing."""
    return jax.tree.map(lambda x: lax.ppermute(x, axes.PIPELINE, pairs), arrays) if hop else arrays


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _remove_axes(names: Iterable[str], spec: PartitionSpec) -> PartitionSpec:
    """Remove axes from a spec: pipeline, which is manual here, or all over which gradients are summed."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return PartitionSpec(*(tuple(axis for axis in entry if axis not in names) or None for entry in entries))
