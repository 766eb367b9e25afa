"""A pipeline inside a mesh: all stages walk over one table in step, and hand streams and errors on.

The functions here run inside a shard_map that is manual over the axis pipeline, for one replica. The
backward pass is written by hand: a stage keeps the inputs of its microbatches and computes the rest
again, so the schedule alone decides how many are alive. Next: `gradients.py`, which calls it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.loss import Batch, Loss, checked, model_inputs, once
from shardtrain.model import BLOCKS, Chain
from shardtrain.pipeline.rows import Stages
from shardtrain.pipeline.table import KINDS, Table
from shardtrain.pipeline.ticks import NONE, make_ticks


class Sums(NamedTuple):
    """What a pipeline computed of a batch, the same on every stage but for its own blocks' gradients.

    Args:
      loss_sum: float32 scalar.
      count: float32 scalar.
      metrics: name -> (sum, count).
      grads: like params, float32, of loss_sum; () without a backward pass.
    """

    loss_sum: jax.Array
    count: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    grads: Any = ()


def pipeline_sums(
    chain: Chain,
    loss: Loss,
    stages: Stages,
    table: Table,
    specs: Any,
    params: Any,
    rng: Callable[[jax.Array], jax.Array],
    batch: Batch,
    row_axes: Sequence[str] = (),
) -> Sums:
    """Walk over a table, of forward and backward tasks or of forward tasks alone (without dropout).

    Args:
      chain: stacked blocks; its stream must have the same shapes between all blocks.
      loss: returns (sum, count), see `loss.Loss`.
      stages: how the blocks are cut; `params["blocks"]` are this stage's rows of them.
      table: of the lock-step form.
      specs: like params, the PartitionSpec of each gradient.
      params: of this stage.
      rng: microbatch -> the key of its rows.
      batch: every array (microbatches, rows, ...).
      row_axes: the mesh axes that share out rows.

    Raises:
      ValueError: blocks change the shape of the stream, or the loss calls the model more than once.
    """
    train = "backward" in table.kinds
    work = _Work(chain, loss, stages, rng, batch, PartitionSpec(tuple(row_axes)), train)
    return _Walk(work, table, specs, params).sums()


class _Work:
    """What a stage computes: pure functions of parameters, a microbatch's number and a stream."""

    def __init__(
        self,
        chain: Chain,
        loss: Loss,
        stages: Stages,
        rng: Callable[..., Any],
        batch: Batch,
        row_spec: PartitionSpec,
        train: bool,
    ) -> None:
        self.chain, self.loss, self.stages, self.rng, self.batch = chain, loss, stages, rng, batch
        self.row_spec, self.train = row_spec, train
        self.stage = lax.axis_index(axes.PIPELINE)

    def microbatch(self, number: Any) -> Batch:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), self.batch)

    def pinned(self, stream: Any) -> Any:
        """A stream, or an error of one, that lies by rows."""
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, self.row_spec), stream)

    def first(self, rest: Any, number: Any) -> Any:
        inputs = model_inputs(self.loss, self.microbatch(number))
        return self.chain.first(rest, {}, self.rng(number), self.train, *inputs)[0]

    def run(self, blocks: Any, chunk: Any, number: Any, stream: Any) -> Any:
        """Send a stream through a chunk's blocks: there is a branch for each number of them."""
        stages = self.stages
        part = chunk * stages.num_stages + self.stage
        start = jnp.asarray(stages.starts)[part]
        sizes = sorted(set(stages.counts))

        def through(size: int, blocks: Any, stream: Any) -> Any:
            rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, chunk * stages.depth, size), blocks)
            rng = self.rng(number)
            return self.chain.run({BLOCKS: rows}, {}, rng, self.train, start, size, stream)[0]

        if len(sizes) == 1:
            return through(sizes[0], blocks, stream)
        which = jnp.asarray([sizes.index(count) for count in stages.counts])[part]
        branches = [partial(through, size) for size in sizes]
        return lax.switch(
            which, [lambda b, x, go=go: self.pinned(go(b, x)) for go in branches], blocks, stream
        )

    def loss_of(self, rest: Any, stream: Any, number: Any) -> tuple[jax.Array, Any]:
        def last(*inputs: Any) -> Any:
            return self.chain.last(rest, {}, self.rng(number), self.train, stream)[0]

        loss_sum, count, metrics = checked(self.loss(once(last), self.microbatch(number)))
        return loss_sum, (count, metrics)


class _Carry(NamedTuple):
    """What a stage hands from tick to tick; streams and errors are lists of arrays.

    Args:
      stream: what arrives from the stage before.
      error: what arrives from the stage behind.
      inputs: for each array of a stream (slots + 1, ...); the last slot takes what nobody needs.
      errors: likewise.
      sums: so far.
    """

    stream: Any
    error: Any
    inputs: Any
    errors: Any
    sums: Sums


class _Walk:
    """A walk over a table on one stage."""

    def __init__(self, work: _Work, table: Table, specs: Any, params: Any) -> None:
        self.work, self.table = work, table
        self.ticks = make_ticks(table)
        self.blocks = params[BLOCKS]
        self.rest = {name: value for name, value in params.items() if name != BLOCKS}
        self.specs = specs
        self.split = _Split(self._stream_shapes())

    def _stream_shapes(self) -> Any:
        work, zero = self.work, jnp.int32(0)
        before = jax.eval_shape(work.first, self.rest, zero)
        after = jax.eval_shape(lambda b, x: work.run(b, zero, zero, x), self.blocks, before)
        if changed := stream_changes(before, after):
            raise ValueError(changed)
        return before

    def sums(self) -> Sums:
        """All ticks; then what only some stages know is added up over all."""
        columns = {name: jnp.asarray(column) for name, column in self.ticks.columns.items()}
        carry, _ = lax.scan(lambda c, row: (self._tick(c, row), None), self._begin(), columns)
        loss_sum, count, metrics, grads = carry.sums
        loss_sum, count, metrics = lax.psum((loss_sum, count, metrics), axes.PIPELINE)
        if self.work.train:
            rest = {name: lax.psum(g, axes.PIPELINE) for name, g in grads.items() if name != BLOCKS}
            grads = {**rest, BLOCKS: grads[BLOCKS]}
        return Sums(loss_sum, count, metrics, grads)

    def _begin(self) -> _Carry:
        floats, others = self.split.shapes
        streams, errors = floats + others, floats if self.work.train else []
        shapes = jax.eval_shape(self.work.loss_of, self.rest, self.split.join(floats, others), jnp.int32(0))
        loss_sum, (count, metrics) = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        grads: Any = ()
        if self.work.train:
            params = {**self.rest, BLOCKS: self.blocks}
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
            grads = jax.tree.map(_constrained, zeros, self.specs)
        return _Carry(
            stream=[jnp.zeros(x.shape, x.dtype) for x in streams],
            error=[jnp.zeros(x.shape, x.dtype) for x in errors],
            inputs=[jnp.zeros((self.ticks.num_inputs + 1, *x.shape), x.dtype) for x in streams],
            errors=[jnp.zeros((self.ticks.num_errors + 1, *x.shape), x.dtype) for x in errors],
            sums=Sums(loss_sum, count, metrics, grads),
        )

    def _tick(self, carry: _Carry, row: dict[str, jax.Array]) -> _Carry:
        mine = {
            name: lax.dynamic_index_in_dim(x, self.work.stage, 0, keepdims=False) for name, x in row.items()
        }
        forward, backward, weight = (_Task.read(mine, kind, self.table) for kind in KINDS)
        carry = carry._replace(
            inputs=_put(carry.inputs, carry.stream, mine["arriving_input"]),
            errors=_put(carry.errors, carry.error, mine["arriving_error"]),
        )
        inputs, stream, sums = self._forward(forward, carry)
        carry = carry._replace(inputs=inputs, stream=self._handed_on(stream, 1), sums=sums)
        if not self.work.train:
            return carry
        errors, error, sums = self._backward(backward, carry)
        carry = carry._replace(errors=errors, error=self._handed_on(error, -1), sums=sums)
        return carry._replace(sums=self._weight(weight, carry)) if self.table.has_weight else carry

    def _cond(self, which: Any, *branches_and_operands: Any) -> Any:
        """`lax.cond` whose branches return arrays that lie alike, as XLA wants it."""
        yes, no, *operands = branches_and_operands

        def pinned(branch: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *operands: self._pinned(branch(*operands))

        return lax.cond(which, pinned(yes), pinned(no), *operands)

    def _pinned(self, result: Any) -> Any:
        """Gradients lie as their parameters, streams and errors by rows."""
        if isinstance(result, Sums):
            return result._replace(
                grads=jax.tree.map(_constrained, result.grads, self.specs if result.grads else ())
            )
        if isinstance(result, tuple | list):
            return type(result)(self._pinned(x) for x in result)
        return self.work.pinned(result)

    def _handed_on(self, arrays: Any, by: int) -> Any:
        """To the next stage (by 1) or the one before; round the ring where parts go round."""
        size = self.table.num_stages
        pairs = [(i, (i + by) % size) for i in range(size)]
        if self.table.num_chunks == 1:
            pairs = [(i, j) for i, j in pairs if j == i + by]
        return [lax.ppermute(x, axes.PIPELINE, pairs) for x in arrays]

    def _forward(self, task: "_Task", carry: _Carry) -> tuple[Any, Any, Sums]:
        work, split = self.work, self.split
        is_first, is_last = self._is_end(task, 0), self._is_end(task, -1)
        stream = self._cond(
            is_first,
            lambda: split.leaves(work.first(self.rest, task.microbatch)),
            lambda: _get(carry.inputs, task.input),
        )
        inputs = _put(carry.inputs, stream, jnp.where(is_first, task.input, NONE))

        def run() -> Any:
            return split.leaves(work.run(self.blocks, task.chunk, task.microbatch, split.tree(stream)))

        def skip() -> Any:
            return stream  # to where nobody waits for it

        if work.train:
            # the last part's output is needed by its own backward alone, which computes it again
            return inputs, self._cond(task.is_there & ~is_last, run, skip), carry.sums
        stream = self._cond(task.is_there, run, skip)

        def add() -> Sums:
            loss_sum, (count, metrics) = work.loss_of(self.rest, split.tree(stream), task.microbatch)
            return _added(carry.sums, loss_sum, count, metrics, {})

        return inputs, stream, self._cond(is_last, add, lambda: carry.sums)

    def _backward(self, task: "_Task", carry: _Carry) -> tuple[Any, Any, Sums]:
        work, split, has_weight = self.work, self.split, self.table.has_weight
        is_first, is_last = self._is_end(task, 0), self._is_end(task, -1)

        def run(blocks: Any, floats: Any, others: Any) -> tuple[Any, Any]:
            stream = split.join(floats, others)
            return split.parted(work.run(blocks, task.chunk, task.microbatch, stream))

        def backward(sums: Sums) -> tuple[Any, Any, Sums]:
            floats, others = split.parted_leaves(_get(carry.inputs, task.input))
            if has_weight:
                out, pull, rest_out = jax.vjp(
                    lambda floats: run(self.blocks, floats, others), floats, has_aux=True
                )
            else:
                out, pull, rest_out = jax.vjp(
                    lambda blocks, floats: run(blocks, floats, others), self.blocks, floats, has_aux=True
                )
            error, sums = self._cond(
                is_last,
                lambda sums: self._loss_error(out, rest_out, task, sums),
                lambda sums: (_get(carry.errors, task.error), sums),
                sums,
            )
            pulled = pull(error)
            if not has_weight:
                sums = sums._replace(grads=self._blocks_added(sums.grads, pulled[0]))
            sums = self._cond(
                is_first, lambda sums: self._first_added(task, pulled[-1], sums), lambda sums: sums, sums
            )
            return error, pulled[-1], sums

        def skip(sums: Sums) -> tuple[Any, Any, Sums]:
            return carry.error, carry.error, sums

        error, before, sums = self._cond(task.is_there, backward, skip, carry.sums)
        errors = _put(carry.errors, error, task.error) if has_weight else carry.errors
        return errors, before, sums

    def _weight(self, task: "_Task", carry: _Carry) -> Sums:
        work, split = self.work, self.split

        def weight(sums: Sums) -> Sums:
            floats, others = split.parted_leaves(_get(carry.inputs, task.input))

            def run(blocks: Any) -> Any:
                stream = split.join(floats, others)
                return split.parted(work.run(blocks, task.chunk, task.microbatch, stream))

            _, pull, _ = jax.vjp(run, self.blocks, has_aux=True)
            (grads,) = pull(_get(carry.errors, task.error))
            return sums._replace(grads=self._blocks_added(sums.grads, grads))

        return self._cond(task.is_there, weight, lambda sums: sums, carry.sums)

    def _loss_error(self, floats: Any, others: Any, task: "_Task", sums: Sums) -> tuple[Any, Sums]:
        """The error of the last part's output, and the sums with what the loss adds to them."""

        def loss_of(rest: Any, floats: Any) -> Any:
            return self.work.loss_of(rest, self.split.join(floats, others), task.microbatch)

        loss_sum, pull, (count, metrics) = jax.vjp(loss_of, self.rest, floats, has_aux=True)
        grads, error = pull(jnp.ones_like(loss_sum))
        return error, _added(sums, loss_sum, count, metrics, grads)

    def _first_added(self, task: "_Task", error: Any, sums: Sums) -> Sums:
        def first(rest: Any) -> Any:
            return self.split.parted(self.work.first(rest, task.microbatch))

        _, pull, _ = jax.vjp(first, self.rest, has_aux=True)
        return sums._replace(grads=_grads_added(sums.grads, *pull(error)))

    def _blocks_added(self, grads: Any, found: Any) -> Any:
        return _grads_added(grads, {BLOCKS: found})

    def _is_end(self, task: "_Task", part: int) -> jax.Array:
        """Whether the task is of the first part (0) or the last (-1)."""
        stage, chunk = (0, 0) if part == 0 else (self.table.num_stages - 1, self.table.num_chunks - 1)
        return task.is_there & (self.work.stage == stage) & (task.chunk == chunk)


class _Task(NamedTuple):
    """A task of this tick on this stage; where there is none its numbers are 0 and mean nothing."""

    is_there: jax.Array
    microbatch: jax.Array
    chunk: Any
    input: jax.Array
    error: jax.Array

    @classmethod
    def read(cls, mine: dict[str, jax.Array], kind: str, table: Table) -> "_Task":
        # where a stage has one chunk its number is known, and slices of its blocks are the blocks
        chunk = 0 if table.num_chunks == 1 else jnp.maximum(mine[f"{kind}_chunk"], 0)
        return cls(
            mine[kind] >= 0,
            jnp.maximum(mine[kind], 0),
            chunk,
            mine[f"{kind}_input"],
            mine[f"{kind}_error"],
        )


class _Split:
    """A stream as lists of arrays: those that have an error, and the others (masks, numbers)."""

    def __init__(self, stream: Any) -> None:
        leaves, self._structure = jax.tree.flatten(stream)
        is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        self._floats = [i for i, yes in enumerate(is_float) if yes]
        self._others = [i for i, yes in enumerate(is_float) if not yes]
        self.shapes = self.parted(stream)

    def parted(self, stream: Any) -> tuple[list[Any], list[Any]]:
        leaves = jax.tree.leaves(stream)
        return [leaves[i] for i in self._floats], [leaves[i] for i in self._others]

    def leaves(self, stream: Any) -> list[Any]:
        floats, others = self.parted(stream)
        return floats + others

    def parted_leaves(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        return leaves[: len(self._floats)], leaves[len(self._floats) :]

    def tree(self, leaves: list[Any]) -> Any:
        return self.join(*self.parted_leaves(leaves))

    def join(self, floats: list[Any], others: list[Any]) -> Any:
        at = {**dict(zip(self._floats, floats, strict=True)), **dict(zip(self._others, others, strict=True))}
        return jax.tree.unflatten(self._structure, [at[i] for i in range(len(at))])


def _get(slots: list[jax.Array], slot: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for x in slots]


def _put(slots: list[jax.Array], values: list[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """With values in a slot, or in the last, which nobody reads."""
    return [
        lax.dynamic_update_index_in_dim(x, value, jnp.where(slot < 0, x.shape[0] - 1, slot), 0)
        for x, value in zip(slots, values, strict=True)
    ]


def _added(sums: Sums, loss_sum: Any, count: Any, metrics: Any, grads: Any) -> Sums:
    """The sums with more in them."""
    add = partial(jax.tree.map, lambda total, x: total + x.astype(jnp.float32))
    return Sums(
        sums.loss_sum + loss_sum,
        sums.count + count,
        add(sums.metrics, metrics),
        _grads_added(sums.grads, grads),
    )


def _grads_added(grads: Any, found: Any) -> Any:
    """Gradients with those of some top-level names added, in float32."""
    if not found:
        return grads
    more = {
        name: jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads[name], found[name])
        for name in found
    }
    return {**grads, **more}


def _constrained(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """As the spec says, but for the axis pipeline, of which this is inside."""
    entries = [
        tuple(a for a in ((e,) if isinstance(e, str) else e or ()) if a != axes.PIPELINE) or None
        for e in spec
    ]
    return lax.with_sharding_constraint(x, PartitionSpec(*entries))


def stream_changes(before: Any, after: Any) -> str:
    """What is wrong where blocks do not return a stream like the one that they were given; "" if nothing."""
    old, new = (
        {jax.tree_util.keystr(path) or "the stream": f"{x.dtype}{list(x.shape)}" for path, x in leaves}
        for leaves in (jax.tree.leaves_with_path(before), jax.tree.leaves_with_path(after))
    )
    if old == new:
        return ""
    changed = [
        f"{name}: {old.get(name, 'nothing')} becomes {new.get(name, 'nothing')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    return (
        f"blocks change the stream ({'; '.join(changed)}), and a pipeline inside a mesh needs one shape"
        " between all of them; use --across pipeline, where every island has a program of its own"
    )
