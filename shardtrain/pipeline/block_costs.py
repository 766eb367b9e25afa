"""Trace a model to find the costs of each of its blocks: flops, and bytes of state and activations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.functional.model import BLOCKS, path_text
from shardtrain.jaxpr.deferred_outputs import defer
from shardtrain.pipeline.costs import ChainTrace
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts

BACKWARD = 2.0
"""Flops of a backward divided by flops of its forward: two matrix products for each one."""

GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, which is float32."""


def model_costs(traced: ChainTrace, init_optimizer: Callable[[Any], Any]) -> ModelCosts:
    """Return the costs of a model's blocks and ends, for a microbatch of the traced rows.

    Flops are counted by XLA before it optimises; the optimizer's state is divided among parameters in
    proportion to their bytes; a backward reads what jax keeps for it, of which XLA may need less.

    Args:
      traced: the model's functions.
      init_optimizer: params -> the optimizer's state; it is only traced.
    """
    params = traced.params
    per_byte = _bytes(jax.eval_shape(init_optimizer, params)) / max(_bytes(params), 1)

    def cost(flops: float, own: Any, saved: float, output: float, deferred: float = 0.0) -> BlockCost:
        return BlockCost(
            forward_flops=flops,
            backward_flops=BACKWARD * flops,
            state_bytes=_bytes(own) * (1 + per_byte) + GRADIENT_BYTES * _elements(own),
            saved_bytes=saved,
            deferred_bytes=deferred,
            output_bytes=output,
        )

    flops = traced.costs("flops")
    blocks, activations = [], traced.entering
    for number in range(1 if traced.chain.stacked else traced.chain.num_blocks):
        block, run = traced.block(number), partial(traced.run, number)
        saved, deferred = (
            count(run, block, activations) for count in (_count_saved_bytes, _count_deferred_bytes)
        )
        activations = jax.eval_shape(run, block, activations)
        blocks.append(cost(flops.blocks[number], block, saved, _bytes(activations), deferred))
    blocks = blocks * traced.chain.num_blocks if traced.chain.stacked else blocks

    def end(paths: Any) -> list[Any]:
        leaves = jax.tree.leaves_with_path({k: v for k, v in params.items() if k != BLOCKS})
        return [leaf for path, leaf in leaves if path_text(path) in paths]

    batch, leaving = traced.batch, traced.leaving
    borrowed = end(traced.last_paths & traced.first_paths)
    first = _count_saved_bytes(lambda p: traced.first(p, traced.zeros(batch)), params)

    def run_last(params: Any, activations: Any) -> Any:
        return traced.last(params, activations, traced.zeros(batch))

    last, deferred = (
        count(run_last, params, leaving) for count in (_count_saved_bytes, _count_deferred_bytes)
    )
    own_last = cost(flops.last, end(traced.last_paths - traced.first_paths), last, 0.0, deferred)
    # the last stage borrows what the first stage also uses, and keeps no optimizer state of it
    lent = _bytes(borrowed) + GRADIENT_BYTES * _elements(borrowed)
    return ModelCosts(
        blocks=blocks,
        first=cost(flops.first, end(traced.first_paths), first, _bytes(traced.entering)),
        last=replace(own_last, state_bytes=own_last.state_bytes + lent),
    )


def _count_saved_bytes(function: Callable[..., Any], params: Any, *inputs: Any) -> float:
    """Return the bytes that jax keeps for the backward of a function, without its parameters."""
    kept = jax.eval_shape(lambda *given: jax.vjp(function, *given)[1], params, *inputs)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    found = 0.0
    for leaf in jax.tree.leaves(kept):
        if (leaf.shape, leaf.dtype) in shapes:
            shapes.remove((leaf.shape, leaf.dtype))
        else:
            found += _bytes(leaf)
    return found


def _count_deferred_bytes(function: Callable[..., Any], params: Any, activations: Any) -> float:
    """Return the bytes that a backward computes and keeps for its weight task, without its inputs."""

    def is_float(x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jnp.inexact)

    def halves(params: Any, activations: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(activations)

        def run(params: Any, floats: list[Any]) -> list[Any]:
            left = iter(floats)
            given = jax.tree.unflatten(structure, [next(left) if is_float(x) else x for x in leaves])
            return list(filter(is_float, jax.tree.leaves(function(params, given))))

        out, pull = jax.vjp(run, params, list(filter(is_float, leaves)))
        grads, found = pull([jnp.ones_like(x) for x in out])
        return found, grads

    return _bytes(jax.eval_shape(defer(halves), params, activations)[1].kept)


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _elements(tree: Any) -> float:
    return float(sum(x.size for x in jax.tree.leaves(tree)))
