"""The forward computations of a stage inside a mesh: the first layers, a part's blocks, the loss.

Next: `mesh_tasks.py`, which differentiates them and calls them in the order of a table.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import BLOCKS, Chain
from shardtrain.functional.model_calls import allow_one_call, model_inputs
from shardtrain.jaxpr.forward import find_constrained_specs
from shardtrain.pipeline.activations import Activations, ActivationTree, describe_activation_changes
from shardtrain.pipeline.stacking import Partition


class MeshStage:
    """The computations of one stage on one batch, in a shard_map that is manual over the axis pipeline.

    Args:
      chain: stacked blocks; their activations must have the same shapes between all blocks.
      loss: returns (sum, count), see `loss.Loss`.
      stages: the partition of the blocks.
      params: the parameters of this stage; `params["blocks"]` are its own stacked blocks.
      rng: number of a microbatch -> the key of its rows.
      batch: every array (microbatches, rows, ...).
      row_axes: the mesh axes over which rows are sharded.
      train: whether dropout is on.

    Raises:
      ValueError: blocks change the shapes of activations, or the loss does not call the model once.
    """

    def __init__(
        self,
        *,
        chain: Chain,
        loss: Loss,
        stages: Partition,
        params: Any,
        rng: Callable[[Any], jax.Array],
        batch: Batch,
        row_axes: Sequence[str],
        train: bool,
    ) -> None:
        self._rows = tuple(row_axes)
        self.chain, self.loss, self.stages, self.rng, self.batch = chain, loss, stages, rng, batch
        self.train = train
        self.blocks = params[BLOCKS]
        self.rest = {name: value for name, value in params.items() if name != BLOCKS}
        self.stage = lax.axis_index(axes.PIPELINE)
        self.tree = self._activation_tree()

    def _activation_tree(self) -> ActivationTree:
        before = jax.eval_shape(lambda: self._first(self.rest, 0))
        size = self.stages.counts[0]
        blocks = self.block_params(size, 0)
        run = jax.make_jaxpr(lambda tree: self._run(size, blocks, 0, 0, tree), return_shape=True)
        program, after = run(before)
        if changed := describe_activation_changes(before, after):
            raise ValueError(changed)
        # between stages activations stay sharded as the blocks say, such as a sequence over context
        specs = [PartitionSpec(self._rows, *(spec or ())[1:]) for spec in find_constrained_specs(program)]
        return ActivationTree(before, specs)

    @cached_property
    def loss_shapes(self) -> Any:
        """Shapes of what `compute_loss` returns."""
        return jax.eval_shape(lambda found: self.compute_loss(self.rest, found, 0), self.tree.shapes)

    def shard_rows(self, arrays: Any) -> Any:
        """Constrain arrays to be sharded over their first dim, the rows of the batch."""
        spec = PartitionSpec(self._rows)
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), arrays)

    def microbatch(self, number: Any) -> Batch:
        """Return one microbatch of the batch."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), self.batch)

    def first(self, rest: Any, number: Any) -> Activations:
        """Return the activations that enter the blocks.

        Args:
          rest: parameters outside the blocks.
          number: the number of the microbatch.
        """
        return self.tree.split(self._first(rest, number))

    def _first(self, rest: Any, number: Any) -> Any:
        # otherwise XLA slices a sharded sequence by a permute, which waits for all stages
        inputs = self.shard_rows(model_inputs(self.loss, self.microbatch(number), self.rng(number)))
        return self.chain.first(rest, {}, self.rng(number), self.train, *inputs)[0]

    def first_block(self, chunk: Any) -> Any:
        """Return the index of a chunk's first block among the stacked blocks of this stage."""
        return chunk * self.stages.depth

    def block_params(self, size: int, chunk: Any) -> Any:
        """Return the parameters of the first `size` blocks of a chunk."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self.first_block(chunk), size), self.blocks)

    def run(self, size: int, blocks: Any, chunk: Any, number: Any, entering: Activations) -> Activations:
        """Return the activations that leave the blocks of a chunk.

        Args:
          size: number of blocks.
          blocks: their parameters.
          chunk: the number of the chunk of this stage.
          number: the number of the microbatch.
          entering: the activations before the blocks.
        """
        return self.tree.split(self._run(size, blocks, chunk, number, self.tree.join(entering)))

    def _run(self, size: int, blocks: Any, chunk: Any, number: Any, tree: Any) -> Any:
        start = self.select_part(self.stages.starts, chunk)
        return self.chain.run({BLOCKS: blocks}, {}, self.rng(number), self.train, start, size, tree)[0]

    def select_part(self, numbers: Sequence[int], chunk: Any) -> jax.Array:
        """Select the number of a chunk of this stage from a list with a number for each part."""
        placement = self.stages.part_placement
        by_stage = [[numbers[part] for part in placement.parts(s)] for s in range(placement.num_stages)]
        return jnp.asarray(by_stage)[self.stage, chunk]

    def compute_loss(self, rest: Any, leaving: Activations, number: Any) -> tuple[jax.Array, Any]:
        """Return (loss sum, (count, metrics)), given the activations that leave the blocks."""

        def last(*inputs: Any) -> Any:
            return self.chain.last(rest, {}, self.rng(number), self.train, self.tree.join(leaving))[0]

        batch = self.shard_rows(self.microbatch(number))
        loss_sum, count, metrics = sum_loss(
            self.loss, allow_one_call(last), batch, self.train, self.rng(number)
        )
        return loss_sum, (count, metrics)
