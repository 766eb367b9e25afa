"""What a stage of a pipeline inside a mesh computes: pure functions of parameters, numbers and streams.

Next: `mesh_pipeline.py`, which calls them as a table says.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.loss import Batch, Loss, checked, model_inputs, once
from shardtrain.functional.model import BLOCKS, Chain
from shardtrain.pipeline.activations import Form, Parted, stream_changes
from shardtrain.pipeline.stacking import Partition


class StageCompute:
    """What a stage computes of one batch; inside a shard_map that is manual over the axis pipeline.

    Args:
      chain: stacked blocks; its stream must have the same shapes between all blocks.
      loss: returns (sum, count), see `loss.Loss`.
      stages: how the blocks are cut.
      params: of this stage; `params["blocks"]` are its rows of the blocks.
      rng: microbatch -> the key of its rows.
      batch: every array (microbatches, rows, ...).
      row_axes: the mesh axes that share out rows.
      train: with dropout.

    Raises:
      ValueError: blocks change the shape of the stream, or the loss does not call the model once.
    """

    def __init__(
        self,
        chain: Chain,
        loss: Loss,
        stages: Partition,
        params: Any,
        rng: Callable[[Any], jax.Array],
        batch: Batch,
        row_axes: tuple[str, ...],
        train: bool,
    ) -> None:
        self.row_spec = PartitionSpec(row_axes)
        self.chain, self.loss, self.stages, self.rng, self.batch = chain, loss, stages, rng, batch
        self.train = train
        self.blocks = params[BLOCKS]
        self.rest = {name: value for name, value in params.items() if name != BLOCKS}
        self.stage = lax.axis_index(axes.PIPELINE)
        self.form = self._form()

    def _form(self) -> Form:
        before = jax.eval_shape(lambda: self._first(self.rest, 0))
        rows = self.rows(self.stages.counts[0], 0)
        after = jax.eval_shape(lambda x: self._run(self.stages.counts[0], rows, 0, 0, x), before)
        if changed := stream_changes(before, after):
            raise ValueError(changed)
        return Form(before)

    @cached_property
    def loss_shapes(self) -> Any:
        """The shapes of what `loss_of` returns."""
        return jax.eval_shape(lambda stream: self.loss_of(self.rest, stream, 0), self.form.shapes)

    def by_rows(self, arrays: Any) -> Any:
        """Arrays that lie by rows."""
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, self.row_spec), arrays)

    def microbatch(self, number: Any) -> Batch:
        """One of the batch."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), self.batch)

    def first(self, rest: Any, number: Any) -> Parted:
        """The stream that enters the blocks."""
        return self.form.parted(self._first(rest, number))

    def _first(self, rest: Any, number: Any) -> Any:
        # else XLA cuts a sharded sequence from the batch by a permute, at which all stages have to meet
        inputs = self.by_rows(model_inputs(self.loss, self.microbatch(number)))
        return self.chain.first(rest, {}, self.rng(number), self.train, *inputs)[0]

    def start(self, chunk: Any) -> Any:
        """Where the blocks of a chunk begin among this stage's rows."""
        return chunk * self.stages.depth

    def rows(self, size: int, chunk: Any) -> Any:
        """The blocks of a chunk, which has so many."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self.start(chunk), size), self.blocks)

    def run(self, size: int, rows: Any, chunk: Any, number: Any, stream: Parted) -> Parted:
        """Send a stream through a chunk's blocks."""
        return self.form.parted(self._run(size, rows, chunk, number, self.form.joined(stream)))

    def _run(self, size: int, rows: Any, chunk: Any, number: Any, stream: Any) -> Any:
        start = self.of_part(self.stages.starts, chunk)
        return self.chain.run({BLOCKS: rows}, {}, self.rng(number), self.train, start, size, stream)[0]

    def of_part(self, numbers: Sequence[int], chunk: Any) -> jax.Array:
        """That of a list with a number for each part which is for a chunk of this stage."""
        placement = self.stages.part_placement
        by_stage = [[numbers[part] for part in placement.parts(s)] for s in range(placement.num_stages)]
        return jnp.asarray(by_stage)[self.stage, chunk]

    def loss_of(self, rest: Any, stream: Parted, number: Any) -> tuple[jax.Array, Any]:
        """(loss sum, (count, metrics)) of what leaves the blocks."""

        def last(*inputs: Any) -> Any:
            return self.chain.last(rest, {}, self.rng(number), self.train, self.form.joined(stream))[0]

        loss_sum, count, metrics = checked(self.loss(once(last), self.microbatch(number)))
        return loss_sum, (count, metrics)
