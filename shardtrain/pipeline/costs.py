"""Trace a model that defines its blocks: their costs, the parameters of its ends, and the parts of a cut.

Next: `traced_cut.py`, which traces a model without blocks; `cuts.py`, which chooses the cut.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import BLOCKS, Chain, Model, Tree, path_text
from shardtrain.functional.model_calls import allow_one_call, model_inputs
from shardtrain.functional.rng import new_key
from shardtrain.jaxpr.forward import find_read
from shardtrain.pipeline.flow import Flow, find_flow
from shardtrain.pipeline.partition import Costs
from shardtrain.pipeline.stacking import Partition

NO_BLOCKS = (
    "the model does not say what its blocks are, so a pipeline inside a mesh cannot cut it; use --across"
    " pipeline, where any model is cut by tracing, or give the nnx module `blocks`, first(*inputs),"
    " run(blocks, activations, keys) and last(activations) (docs/pipeline.md), where every parameter of"
    " stacked blocks names its first dim `layers`; or use pipeline=1"
)

STATE = "model_state/"
"""Prefix of the paths of model state if they are listed together with paths of parameters."""


class ChainTrace:
    """The functions of a chain (first, run, last), traced by shapes without computing anything.

    Args:
      model: a model with a chain.
      loss: the function that calls the model.
      microbatch: name -> array or shape (rows, ...).
    """

    def __init__(self, model: Model, loss: Loss, microbatch: Mapping[str, Any]) -> None:
        assert model.chain is not None
        self.chain: Chain = model.chain
        self.loss = loss
        self.batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in microbatch.items()}
        self.params, self.model_state = jax.eval_shape(model.init, new_key(0))
        self.entering = jax.eval_shape(self.first, self.params, self.batch)

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return self.chain.num_blocks

    @property
    def stacked(self) -> bool:
        """Whether the parameters of all blocks are stacked."""
        return self.chain.stacked

    def is_block(self, path: str) -> bool:
        """Whether a parameter or model state belongs to a block."""
        return path.startswith(f"{BLOCKS}/")

    @cached_property
    def leaving(self) -> Any:
        """Shapes of the activations that leave the blocks."""
        blocks = self.params.get(BLOCKS, {})
        return jax.eval_shape(partial(self.run, 0, number=self.chain.num_blocks), blocks, self.entering)

    def block(self, number: int) -> Any:
        """Return the shapes of one block's parameters."""
        blocks = self.params[BLOCKS]
        if not self.chain.stacked:
            return {str(number): blocks.get(str(number), {})}
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), blocks)

    def first(self, params: Any, batch: Any, model_state: Any = None) -> Any:
        """Return the activations that enter the blocks."""
        state = self.zeros(self.model_state) if model_state is None else model_state
        return self.enter(params, state, new_key(0), True, batch)[0]

    def enter(self, params: Any, model_state: Any, rng: Any, train: bool, batch: Any) -> tuple[Any, Any]:
        """Return (activations that enter the blocks, model state), for the inputs that the loss selects."""
        return self.chain.first(params, model_state, rng, train, *model_inputs(self.loss, batch, rng))

    def run(self, start: int, blocks: Any, activations: Any, number: int = 1) -> Any:
        """Return the activations after `number` blocks, starting at block `start`."""
        state, key = self.zeros(self.model_state), new_key(0)
        return self.chain.run({BLOCKS: blocks}, state, key, True, start, number, activations)[0]

    def last(self, params: Any, activations: Any, batch: Any, model_state: Any = None) -> Any:
        """Return the loss sum, given the activations that leave the blocks."""
        state = self.zeros(self.model_state) if model_state is None else model_state
        return self.leave(params, state, new_key(0), True, batch, activations)[0][0]

    def leave(
        self, params: Any, model_state: Any, rng: Any, train: bool, batch: Any, activations: Any
    ) -> tuple[Any, Any]:
        """Return ((loss sum, count, metrics), model state), given the activations that leave the blocks."""
        left = []

        # the loss calls the rest of the model, whose model state is stored in `left`
        def apply(*inputs: Any) -> Any:
            outputs, changed = self.chain.last(params, model_state, rng, train, activations)
            left.append(changed)
            return outputs

        return sum_loss(self.loss, allow_one_call(apply), batch, train, rng), left[0]

    @cached_property
    def losses(self) -> Any:
        """Shapes of what the loss returns: (sum, count, metrics)."""

        def run(params: Any, model_state: Any, batch: Any, leaving: Any) -> Any:
            return self.leave(params, model_state, new_key(0), True, batch, leaving)[0]

        return jax.eval_shape(run, self.params, self.model_state, self.batch, self.leaving)

    @cached_property
    def first_paths(self) -> frozenset[str]:
        """Paths of the parameters and model state (`model_state/...`) that are used before the blocks."""
        batch = self.zeros(self.batch)
        return _find_used(
            lambda params, state: self.first(params, batch, state), self.params, self.model_state
        )

    @cached_property
    def last_paths(self) -> frozenset[str]:
        """Paths of the parameters and model state that are used after the blocks, including the loss."""
        activations, batch = self.zeros(self.leaving), self.zeros(self.batch)
        return _find_used(
            lambda params, state: self.last(params, activations, batch, state), self.params, self.model_state
        )

    def part_paths(self, stages: Partition, part: int) -> frozenset[str]:
        """Return the paths of the parameters and model state outside the blocks that a part reads."""
        found = self.first_paths if part == 0 else frozenset()
        return found | self.last_paths if part == len(stages.counts) - 1 else found

    def run_part(
        self,
        stages: Partition,
        part: int,
        params: Tree,
        model_state: Tree,
        rng: Any,
        train: bool,
        batch: Batch,
        activations: Any,
    ) -> tuple[Any, Tree]:
        """Run a part, see `StageModel.run`."""
        chain, start, count = self.chain, stages.starts[part], stages.counts[part]
        # before the blocks: only the first part reads the inputs of the batch
        if part == 0:
            activations, model_state = self.enter(params, model_state, rng, train, batch)
        # the blocks of this part; between parts that is all
        blocks = {BLOCKS: params[BLOCKS]}
        activations, model_state = chain.run(blocks, model_state, rng, train, start, count, activations)
        if part < len(stages.counts) - 1:
            return activations, model_state
        # after the blocks: the rest of the model and the loss
        found, model_state = self.leave(params, model_state, rng, train, batch, activations)
        loss_sum, *counted = found
        return (loss_sum, tuple(counted)), model_state

    def select_blocks(self, blocks: Any, stages: Partition, part: int, offset: int) -> Any:
        """Select the parameters of a part's blocks; `offset` is the row of its first block if stacked."""
        start, count = stages.starts[part], stages.counts[part]
        if self.stacked:
            return jax.tree.map(lambda x: x[offset : offset + count], blocks)
        numbers = map(str, range(start, start + count))
        return {number: blocks[number] for number in numbers if number in blocks}

    def flow(self, stages: Partition, microbatch: Mapping[str, Any]) -> Flow:
        """Return the values between all parts, see `StageModel.flow`."""
        batch, state = self.zeros(microbatch), self.zeros(self.model_state)

        def part(number: int) -> Callable[[Any, Any], Any]:
            def run(params: Any, activations: Any) -> Any:
                blocks = self.select_blocks(params.get(BLOCKS, {}), stages, number, stages.starts[number])
                params, key = {**params, BLOCKS: blocks}, new_key(0)
                return self.run_part(stages, number, params, state, key, True, batch, activations)[0]

            return run

        num_rows = next(iter(microbatch.values())).shape[0]
        return find_flow([part(number) for number in range(len(stages.counts))], self.params, num_rows)

    def zeros(self, shapes: Any) -> Any:
        """Return arrays of zeros of these shapes."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def costs(self, by: str) -> Costs:
        """Return the costs of each block, and of the layers before and after the blocks.

        Args:
          by: "params", numbers of parameters; or "flops", operations of a forward pass of these rows, counted
            before XLA optimises the program.
        """
        if by == "params":
            sizes = {path_text(path): leaf.size for path, leaf in jax.tree.leaves_with_path(self.params)}
            first, last = self.first_paths, self.last_paths
            return Costs(
                blocks=[
                    float(sum(leaf.size for leaf in jax.tree.leaves(self.block(i))))
                    for i in range(self.chain.num_blocks)
                ],
                first=float(sum(size for path, size in sizes.items() if path in first)),
                last=float(sum(size for path, size in sizes.items() if path in last)),
            )
        # stacked blocks are equal: count one for all
        blocks, activations = [], self.entering
        for block in range(1 if self.chain.stacked else self.chain.num_blocks):
            flops, activations = count_flops(partial(self.run, block), self.block(block), activations)
            blocks.append(flops)
        return Costs(
            blocks=blocks * self.chain.num_blocks if self.chain.stacked else blocks,
            first=count_flops(self.first, self.params, self.batch)[0],
            last=count_flops(self.last, self.params, self.leaving, self.batch)[0],
        )


def count_flops(function: Any, *shapes: Any) -> tuple[float, Any]:
    """Return the flops of a function, and the shapes that it returns."""
    lowered = jax.jit(function).lower(*shapes)
    return float((lowered.cost_analysis() or {}).get("flops", 0.0)), lowered.out_info


def _find_used(function: Any, params: Any, model_state: Any) -> frozenset[str]:
    """Return the paths of the parameters and model state that any operation of a function reads."""
    is_read = find_read(jax.make_jaxpr(function)(params, model_state))
    paths = [path_text(path) for path, _ in jax.tree.leaves_with_path(params)]
    paths += [f"{STATE}{path_text(path)}" for path, _ in jax.tree.leaves_with_path(model_state)]
    return frozenset(path for path, yes in zip(paths, is_read, strict=True) if yes)
