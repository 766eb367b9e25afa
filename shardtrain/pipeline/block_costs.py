"""Trace a model to find what each of its blocks costs a stage: flops, and bytes of state and activations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from shardtrain.functional.model import BLOCKS, path_text
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts

BACKWARD = 2.0
"""Flops of a backward over those of its forward: of each matrix product two, for inputs and weights."""

GRADIENT_BYTES = 4
"""Of each parameter: gradients are added up in float32."""


def model_costs(traced: Traced, init_optimizer: Callable[[Any], Any]) -> ModelCosts:
    """Return the costs of a model's blocks and ends, for a microbatch of the rows that were traced.

    Flops are those that XLA counts before it optimises; the optimizer's state is shared by parameters in
    proportion to their bytes; what a backward reads is what jax keeps for it, of which XLA may need less.

    Args:
      traced: the model's functions.
      init_optimizer: params -> the optimizer's state; traced only.
    """
    params = traced.params
    per_byte = _bytes(jax.eval_shape(init_optimizer, params)) / max(_bytes(params), 1)

    def cost(flops: float, own: Any, saved: float, output: float) -> BlockCost:
        return BlockCost(
            forward_flops=flops,
            backward_flops=BACKWARD * flops,
            state_bytes=_bytes(own) * (1 + per_byte) + GRADIENT_BYTES * _elements(own),
            saved_bytes=saved,
            output_bytes=output,
        )

    flops = traced.costs("flops")
    blocks, activations = [], traced.entering
    for number in range(1 if traced.chain.stacked else traced.chain.num_blocks):
        block, run = traced.block(number), partial(traced.run, number)
        saved = _saved_bytes(run, block, activations)
        activations = jax.eval_shape(run, block, activations)
        blocks.append(cost(flops.blocks[number], block, saved, _bytes(activations)))
    blocks = blocks * traced.chain.num_blocks if traced.chain.stacked else blocks

    def end(paths: Any) -> list[Any]:
        leaves = jax.tree.leaves_with_path({k: v for k, v in params.items() if k != BLOCKS})
        return [leaf for path, leaf in leaves if path_text(path) in paths]

    batch, leaving = traced.batch, traced.leaving
    borrowed = end(traced.last_paths & traced.first_paths)
    first = _saved_bytes(lambda p: traced.first(p, traced.zeros(batch)), params)
    last = _saved_bytes(lambda p, x: traced.last(p, x, traced.zeros(batch)), params, leaving)
    own_last = cost(flops.last, end(traced.last_paths - traced.first_paths), last, 0.0)
    # what the first stage has too is lent to the last one, which keeps no optimizer state of it
    lent = _bytes(borrowed) + GRADIENT_BYTES * _elements(borrowed)
    return ModelCosts(
        blocks=blocks,
        first=cost(flops.first, end(traced.first_paths), first, _bytes(traced.entering)),
        last=replace(own_last, state_bytes=own_last.state_bytes + lent),
    )


def _saved_bytes(function: Callable[..., Any], params: Any, *inputs: Any) -> float:
    """Return the bytes that jax keeps for the backward of a function, its parameters left out."""
    kept = jax.eval_shape(lambda *given: jax.vjp(function, *given)[1], params, *inputs)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    found = 0.0
    for leaf in jax.tree.leaves(kept):
        if (leaf.shape, leaf.dtype) in shapes:
            shapes.remove((leaf.shape, leaf.dtype))
        else:
            found += _bytes(leaf)
    return found


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _elements(tree: Any) -> float:
    return float(sum(x.size for x in jax.tree.leaves(tree)))
