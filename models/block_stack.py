"""Make blocks with stacked parameters, and apply them one after the other, scanned or unrolled.

Next: `transformer.py`, which has the parts of blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.axes import LAYERS
from shardtrain.functional.remat_counts import RematCounts
from shardtrain.functional.remat_policies import REMAT_POLICIES, name_block_input, not_elementwise
from shardtrain.models.ops import Ops
from shardtrain.models.transformer_options import BlockOptions


def stack_blocks(kind: Any, config: BlockOptions, rngs: nnx.Rngs) -> Any:
    """Make one module with the parameters of all blocks, stacked along a first dim layers."""

    # each block draws its parameters from a key of its own; nnx.vmap stacks them
    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: LAYERS})
    def stack(rngs: nnx.Rngs) -> Any:
        return kind(config, rngs=rngs)

    return stack(nnx.Rngs(params=rngs.params()))


def walk(
    ops: Ops,
    config: BlockOptions,
    run_block: Callable[[Any, Any, Any], Any],
    blocks: Any,
    x_BTD: Any,
    keys: Any,
) -> Any:
    """Apply stacked blocks to a residual stream, scanned or unrolled, with the remat policy `remat`.

    Args:
      ops: the operations of the model.
      config: the configuration, for `scan` and `remat`.
      run_block: (block, stream, key) -> stream; a new function at each call.
      blocks: the blocks, stacked along the first dim of every parameter.
      x_BTD: the input of the first block, an array or a tree of arrays.
      keys: a dropout key for each block, or a pytree of arrays with a row for each block; or None.
    """
    num_blocks = len(jax.tree.leaves(blocks)[0])
    if isinstance(config.remat, RematCounts):
        # one loop for each policy
        counts = config.remat.split(num_blocks)
        parts = split_stack((blocks, keys), list(counts.values()))
        for policy, (part, of_part) in zip(counts, parts, strict=True):
            x_BTD = walk(ops, replace(config, remat=policy), run_block, part, x_BTD, of_part)
        return x_BTD
    # few blocks on one device become plain code, in which no weight is gathered
    remat: str = config.remat
    is_plain = remat in ("none", "weights") and is_plain_code(ops, num_blocks, scan=config.scan)
    # recompute what the policy does not keep; outside of a scan XLA could merge that with the forward pass
    if remat != "none" and not is_plain:
        keeps_products = remat == "weights" and ops.keeps_products
        policy, kept = not_elementwise if keeps_products else REMAT_POLICIES[remat], run_block

        def recomputed(block: Any, x_BTD: Any, key: Any) -> Any:
            return kept(block, name_block_input(x_BTD, remat), key)

        # XLA unrolls a loop of one trip
        is_loop = config.scan and num_blocks > 1
        run_block = jax.checkpoint(recomputed, policy=policy, prevent_cse=not is_loop)
    # one compiled block for all, or one for each
    if config.scan:

        def step(x_BTD: Any, each: tuple[Any, Any]) -> tuple[Any, None]:
            block, key = each
            return run_block(block, x_BTD, key), None

        return jax.lax.scan(step, x_BTD, (blocks, keys), unroll=num_blocks if is_plain else 1)[0]
    for block, key in unstack((blocks, keys)):
        x_BTD = run_block(block, x_BTD, key)
    return x_BTD


def is_plain_code(ops: Ops, num_blocks: int, *, scan: bool) -> bool:
    """Return whether blocks become plain code: on one CPU or GPU, if they are not scanned or few.

    A loop copies weights, activations for the backward pass and gradients. The parameters stay stacked.
    """
    return ops.most_unrolled > 0 and (not scan or num_blocks <= ops.most_unrolled)


def unstack(tree: Any) -> list[Any]:
    """Split a pytree into the rows of its leaves."""
    parts = split_stack(tree, [1] * len(jax.tree.leaves(tree)[0]))
    return [jax.tree.map(lambda part: jnp.squeeze(part, 0), part) for part in parts]


def split_stack(tree: Any, counts: Sequence[int]) -> list[Any]:
    """Split a pytree along the first dim of its leaves, so that the gradient is one concatenation.

    Args:
      tree: arrays (sum of counts, ...).
      counts: the rows of each part.
    """
    leaves, treedef = jax.tree.flatten(tree)
    pieces = [jax.lax.split(leaf, counts) for leaf in leaves]
    return [jax.tree.unflatten(treedef, part) for part in zip(*pieces, strict=True)]
