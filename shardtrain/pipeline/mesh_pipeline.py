"""A pipeline inside a mesh: all stages walk over one table in step, and hand streams and errors on.

The functions here run inside a shard_map that is manual over the axis pipeline, for one replica. The
backward pass is written by hand: a stage keeps the inputs of its microbatches and computes the rest
again, so the schedule alone decides how many are alive. Next: `train_step/gradients.py`, which calls it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import BLOCKS, Chain
from shardtrain.pipeline.activations import Parted, get, make_slots, put
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.stage_compute import StageCompute
from shardtrain.pipeline.sums import Sums, with_grads, with_loss, with_rows
from shardtrain.pipeline.table import KINDS, Table
from shardtrain.pipeline.tick_arrays import NONE, make_ticks


def pipeline_sums(
    chain: Chain,
    loss: Loss,
    stages: Partition,
    table: Table,
    specs: Any,
    params: Any,
    rng: Callable[[Any], jax.Array],
    batch: Batch,
    row_axes: Sequence[str] = (),
) -> Sums:
    """Walk over a table, of forward and backward tasks or of forward tasks alone (without dropout).

    Args:
      chain: stacked blocks; its stream must have the same shapes between all blocks.
      loss: returns (sum, count), see `loss.Loss`.
      stages: how the blocks are cut; `params["blocks"]` are this stage's rows of them.
      table: one task of each kind a tick at most.
      specs: like params, the PartitionSpec of each gradient.
      params: of this stage.
      rng: microbatch -> the key of its rows.
      batch: every array (microbatches, rows, ...).
      row_axes: the mesh axes that share out rows.

    Raises:
      ValueError: the table is not for these parts, blocks change the shape of the stream, or the loss does
        not call the model once.
    """
    if table.part_placement != stages.part_placement:
        raise ValueError(
            f"schedule {table.name!r} is for {table.part_placement}, and the blocks are cut for"
            f" {stages.part_placement}; make the partition with placement={table.placement!r}, as"
            " pipeline.costs.make_partition does"
        )
    train = "backward" in table.kinds
    work = StageCompute(chain, loss, stages, params, rng, batch, tuple(row_axes), train)
    return _Walk(work, table, specs, row_axes).sums()


class _Carry(NamedTuple):
    """What a stage hands from tick to tick.

    Args:
      stream: what goes to the next stage.
      error: what goes to the stage before, a list like the floats of a stream.
      inputs: slots of streams.
      errors: slots of errors.
      sums: so far.
    """

    stream: Parted
    error: list[Any]
    inputs: Parted
    errors: list[Any]
    sums: Sums


class _Task(NamedTuple):
    """A task of this tick on this stage; where there is none its numbers are 0 and mean nothing.

    `never` is False, which XLA cannot know (see `_after`).
    """

    never: jax.Array
    is_there: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    microbatch: jax.Array
    chunk: Any
    input: jax.Array
    error: jax.Array


class _Walk:
    """A walk over a table on one stage.

    In a tick one thing waits for another: permutes (all stages meet there), forward, backward, weight. For
    where two of them contain collectives and neither needs the other, XLA's runtime for CPUs begins with
    either, on each device as it comes, and they wait for each other for ever (`plan.rendezvous`).
    """

    def __init__(self, work: StageCompute, table: Table, specs: Any, row_axes: Sequence[str]) -> None:
        self.work, self.table = work, table
        self.specs = jax.tree.map(partial(_without, {axes.PIPELINE}), specs) if work.train else {}
        self.whole = jax.tree.map(partial(_without, {axes.PIPELINE, *row_axes}), specs)
        self.ticks = make_ticks(table)

    def sums(self) -> Sums:
        """All ticks; then what only some stages know is added up over all."""
        columns = {name: jnp.asarray(column) for name, column in self.ticks.columns.items()}
        carry, _ = lax.scan(lambda c, row: (self._tick(c, row), None), self._begin(), columns)
        own = {name: grads for name, grads in carry.sums.grads.items() if name == BLOCKS}
        rest = {name: grads for name, grads in carry.sums.grads.items() if name != BLOCKS}
        sums = lax.psum(carry.sums._replace(grads=rest), axes.PIPELINE)
        return sums._replace(grads={**sums.grads, **own})

    def _begin(self) -> _Carry:
        work, stream = self.work, self.work.form.shapes
        error = stream.floats if work.train else []
        loss_sum, (count, metrics) = work.loss_shapes
        params = {**work.rest, BLOCKS: work.blocks} if work.train else {}
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), Sums(loss_sum, count, metrics, params))
        return _Carry(
            stream=_zeros(stream),
            error=_zeros(error),
            inputs=make_slots(self.ticks.num_inputs, stream),
            errors=make_slots(self.ticks.num_cotangents, error),
            sums=self._pinned(sums),
        )

    def _tick(self, carry: _Carry, row: dict[str, jax.Array]) -> _Carry:
        mine = {name: lax.dynamic_index_in_dim(x, self.work.stage, 0, False) for name, x in row.items()}
        forward, backward, weight = (self._task(mine, kind) for kind in KINDS)
        carry = self._received(carry, mine, forward.never)
        carry = self._forward(forward, carry)
        if self.work.train:
            carry = self._backward(backward, carry)
        return self._weight(weight, carry) if self.table.has_weight else carry

    def _received(self, carry: _Carry, mine: dict[str, jax.Array], never: jax.Array) -> _Carry:
        """Permute what all stages computed in the last tick, and put what arrives here into its slots.

        A stage sends over every hop of the placement, and keeps what the table says is for it. Each permute
        is made to wait for the one before, so that the forward, which reads the slots, waits for all.
        """
        before: list[Any] | None = None

        def ordered(floats: list[Any]) -> list[Any]:
            nonlocal before
            found = floats if before is None else _after(floats, before, never)
            before = found if self.work.train else None
            return found

        inputs, errors = carry.inputs, carry.errors
        for hop, pairs in self.table.part_placement.hops.items():
            back = tuple((to, origin) for origin, to in pairs)
            error = ordered(_permuted(carry.error, hop, back))
            stream = _permuted(carry.stream, hop, pairs)
            stream = stream._replace(floats=ordered(stream.floats))
            inputs = put(inputs, stream, mine[f"arriving_input_{hop}"])
            errors = put(errors, error, mine[f"arriving_cotangent_{hop}"])
        return carry._replace(inputs=inputs, errors=errors)

    def _task(self, mine: dict[str, jax.Array], kind: str) -> _Task:
        # where a stage has one chunk its number is known, and slices of its blocks are the blocks
        chunk = 0 if self.table.num_chunks == 1 else jnp.maximum(mine[f"{kind}_chunk"], 0)
        stage, is_there, placement = self.work.stage, mine[kind] >= 0, self.table.part_placement
        return _Task(
            never=mine[kind] < NONE,
            is_there=is_there,
            is_first=is_there & (stage == placement.stage(0)) & (chunk == 0),
            is_last=is_there & (stage == placement.last_stage) & (chunk == self.table.num_chunks - 1),
            microbatch=jnp.maximum(mine[kind], 0),
            chunk=chunk,
            input=mine[f"{kind}_input"],
            error=mine[f"{kind}_cotangent"],
        )

    def _forward(self, task: _Task, carry: _Carry) -> _Carry:
        work = self.work
        stream = self._either(
            task.is_first,
            lambda: self._first(task, work.rest),
            lambda: get(carry.inputs, task.input),
        )

        def forward(size: int) -> Parted:
            rows = work.rows(size, task.chunk)
            return work.run(size, rows, task.chunk, task.microbatch, stream)

        # where there is no task a stream goes to where nobody waits for it; and what leaves the last part
        # only its own backward needs, which computes it again
        is_needed = task.is_there & ~task.is_last if work.train else task.is_there
        out = self._by_size(is_needed, task, forward, lambda: stream)
        if not work.train:
            return carry._replace(stream=out, sums=self._loss_added(task, out, carry.sums))
        kept = stream._replace(floats=_after(stream.floats, out.floats, task.never))
        inputs = put(carry.inputs, kept, jnp.where(task.is_first, task.input, NONE))
        return carry._replace(inputs=inputs, stream=out)

    def _first(self, task: _Task, rest: Any) -> Parted:
        """The stream that the batch gives."""
        # A lookup, and the scatter that is its gradient, need a table that is whole over the axes of rows:
        # with another XLA ends the process, for its partitioner fails a check of its own in here.
        whole = {
            name: jax.tree.map(lax.with_sharding_constraint, rest[name], self.whole[name]) for name in rest
        }
        return self.work.first(whole, task.microbatch)

    def _loss_added(self, task: _Task, stream: Parted, sums: Sums) -> Sums:
        def added(sums: Sums) -> Sums:
            loss_sum, (count, metrics) = self.work.loss_of(self.work.rest, stream, task.microbatch)
            return with_loss(sums, loss_sum, count, metrics)

        return self._either(task.is_last, added, lambda sums: sums, sums)

    def _backward(self, task: _Task, carry: _Carry) -> _Carry:
        has_weight = self.table.has_weight
        by = ("stream",) if has_weight else ("stream", "rows")

        def backward(size: int, sums: Sums) -> tuple[Any, Any, Sums]:
            out, pull = self._linear(size, task, carry, by)
            error, sums = self._error(size, task, out, carry, sums)
            found = pull(error)
            if has_weight:
                return error, found["stream"], self._first_added(task, found["stream"], sums)
            sums = with_rows(sums, found["rows"], self.work.start(task.chunk))
            return error, found["stream"], sums

        def skip(sums: Sums) -> tuple[Any, Any, Sums]:
            return carry.error, carry.error, sums

        error, before, sums = self._by_size(task.is_there, task, backward, skip, carry.sums)
        if not has_weight:
            sums = self._first_added(task, before, sums)
        errors = put(carry.errors, error, task.error) if has_weight else carry.errors
        return carry._replace(error=before, errors=errors, sums=sums)

    def _weight(self, task: _Task, carry: _Carry) -> _Carry:
        def weight(size: int, sums: Sums) -> Sums:
            _, pull = self._linear(size, task, carry, ("rows",))
            found = pull(get(carry.errors, task.error))
            return with_rows(sums, found["rows"], self.work.start(task.chunk))

        sums = self._by_size(task.is_there, task, weight, lambda sums: sums, carry.sums)
        return carry._replace(sums=sums)

    def _linear(
        self, size: int, task: _Task, carry: _Carry, by: Sequence[str]
    ) -> tuple[Parted, Callable[[list[Any]], dict[str, Any]]]:
        """What leaves a part, and error -> errors of its stream and gradients of its rows, as asked for."""
        work, stream = self.work, get(carry.inputs, task.input)
        values = {"rows": work.rows(size, task.chunk), "stream": stream.floats}

        def run(varied: dict[str, Any]) -> Parted:
            rows, floats = ({**values, **varied}[name] for name in ("rows", "stream"))
            return work.run(size, rows, task.chunk, task.microbatch, Parted(floats, stream.others))

        floats, pull, others = jax.vjp(run, {name: values[name] for name in by}, has_aux=True)
        return Parted(floats, others), lambda error: pull(error)[0]

    def _error(
        self, size: int, task: _Task, out: Parted, carry: _Carry, sums: Sums
    ) -> tuple[list[Any], Sums]:
        """The error of what leaves a part; and the sums, with what the loss adds to them."""
        work = self.work

        def of_loss(sums: Sums) -> tuple[list[Any], Sums]:
            def loss_of(rest: Any, floats: Any) -> Any:
                return work.loss_of(rest, Parted(floats, out.others), task.microbatch)

            loss_sum, pull, (count, metrics) = jax.vjp(loss_of, work.rest, out.floats, has_aux=True)
            grads, error = pull(jnp.ones_like(loss_sum))
            return error, with_grads(with_loss(sums, loss_sum, count, metrics), grads)

        def arrived(sums: Sums) -> tuple[list[Any], Sums]:
            return get(carry.errors, task.error), sums

        if size != work.stages.counts[-1]:
            return arrived(sums)
        return self._either(task.is_last, of_loss, arrived, sums)

    def _first_added(self, task: _Task, error: list[Any], sums: Sums) -> Sums:
        """The sums with the gradients of what comes before the blocks."""
        work = self.work

        def added(sums: Sums) -> Sums:
            _, pull, _ = jax.vjp(partial(self._first, task), work.rest, has_aux=True)
            return with_grads(sums, *pull(error))

        return self._either(task.is_first, added, lambda sums: sums, sums)

    def _by_size(
        self,
        is_there: jax.Array,
        task: _Task,
        run: Callable[..., Any],
        skip: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        """`run(size, ...)` where a task is there, `skip(...)` where not: a branch for each size of a part."""
        sizes = sorted(set(self.work.stages.counts))
        which = self.work.of_part([sizes.index(count) for count in self.work.stages.counts], task.chunk)
        branches = [skip, *(partial(run, size) for size in sizes)]
        return self._switch(jnp.where(is_there, 1 + which, 0), branches, *operands)

    def _either(
        self, which: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any
    ) -> Any:
        return self._switch(which.astype(jnp.int32), [no, yes], *operands)

    def _switch(self, which: jax.Array, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        """`lax.switch` whose branches return arrays that lie alike, as XLA wants it."""

        def pinned(branch: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *operands: self._pinned(branch(*operands))

        return lax.switch(which, [pinned(branch) for branch in branches], *operands)

    def _pinned(self, result: Any) -> Any:
        """Gradients lie as their parameters, streams and errors by rows."""

        def pinned(x: Any) -> Any:
            if not isinstance(x, Sums):
                return self.work.by_rows(x)
            return x._replace(grads=jax.tree.map(lax.with_sharding_constraint, x.grads, self.specs))

        return jax.tree.map(pinned, result, is_leaf=lambda x: isinstance(x, Sums))


def _permuted(arrays: Any, hop: int, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send arrays along the pipeline axis; a hop of 0 stays on its stage, without a message."""
    return jax.tree.map(lambda x: lax.ppermute(x, axes.PIPELINE, pairs), arrays) if hop else arrays


def _after(values: list[jax.Array], others: list[jax.Array], never: jax.Array) -> list[jax.Array]:
    """Values that are there once others of the same shapes are.

    Args:
      values: what a conditional takes that must wait.
      others: what it must wait for.
      never: False, which XLA must not find out.
    """
    zero = jnp.zeros((), jnp.float32)
    return [jnp.where(never & (y != 0), zero.astype(x.dtype), x) for x, y in zip(values, others, strict=True)]


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _without(names: Iterable[str], spec: PartitionSpec) -> PartitionSpec:
    """A spec without some axes: pipeline, of which this is inside, or all over which gradients are summed."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return PartitionSpec(*(tuple(axis for axis in entry if axis not in names) or None for entry in entries))
