"""What blocks read from the residual stream (batch, seq, embed), and what they add to it.

With a sequence that is sharded over tensor between blocks, what they read is gathered and what they add is
reduce-scattered: by the compiler, or by the run while it multiplies (docs/decisions/0058).
"""

from typing import Any

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from shardtrain.axes import BATCH, EMBED, RESIDUAL_SEQ, SEQ
from shardtrain.functional.remat_policies import BLOCK_OUTPUT, WHOLE_SEQ
from shardtrain.models.float8 import Dims, Products, product
from shardtrain.models.one_cpu import compute_once

STREAM = (BATCH, RESIDUAL_SEQ, EMBED)


def gather_sequence(x_BTD: jax.Array) -> jax.Array:
    """All-gather a norm's output along a sharded sequence, after it was computed on shards.

    Both constraints are needed: the backward pass then reduces the norm's bias from shards. A checkpoint
    name makes remat "weights" keep it instead of gathering it again.
    """
    x_BTD = with_logical_constraint(with_logical_constraint(x_BTD, STREAM), (BATCH, SEQ, EMBED))
    return checkpoint_name(x_BTD, WHOLE_SEQ)


def _find_run() -> Any:
    """Return the run's `CollectiveMatmul`, which models look up as its attention; None without one."""
    return getattr(get_logical_axis_rules(), "products", None)


def read_by_products(x_BTD: jax.Array) -> jax.Array:
    """Return the input of `read_from_stream`, gathered unless the run multiplies parts."""
    return gather_sequence(x_BTD) if _find_run() is None else with_logical_constraint(x_BTD, STREAM)


def gather(x_BTD: jax.Array) -> jax.Array:
    """Return the whole sequence of a result of `read_by_products`, for other readers."""
    return x_BTD if _find_run() is None else gather_sequence(x_BTD)


def read_from_stream(x_BTD: jax.Array, kernel: jax.Array, dims: Dims, products: Products = "") -> jax.Array:
    """Multiply what a block reads with a kernel.

    Args:
      x_BTD: of `read_by_products`.
      kernel: (embed, ...), in the compute dtype, sharded as it is stored.
      dims: its names where it is used.
      products: see `float8.product`.

    Returns:
      (batch, seq, ...), of the whole sequence.

    Raises:
      ValueError: products in 8 bits of parts of a sequence.
    """
    if (of_run := _find_run()) is not None:
        _check(products)
        y = of_run.gathered(x_BTD, with_logical_constraint(kernel, dims), dims)
        if y is not None:
            return y
    return product(gather(x_BTD), kernel, dims, 1, products)


def project_to_stream(linear: Any, x: jax.Array) -> jax.Array:
    """Project onto the residual stream: reduced over tensor, or reduce-scattered along a sharded sequence.

    Args:
      linear: `layers.Linear`, or what has its fields and methods.
      x: (batch, seq, ...), the features that it reads.
    """
    y_BTD = None
    if (of_run := _find_run()) is not None:
        _check(linear.products)
        dims = (*linear.into, *linear.out)
        y_BTD = of_run.multiply_scattered(x, with_logical_constraint(linear.cast(), dims), dims)
    if y_BTD is None:
        # constrained unsharded first, so that the backward pass gathers its gradient once
        y_BTD = with_logical_constraint(linear.product(x), (BATCH, SEQ, EMBED))
    else:
        y_BTD = linear.adapted(y_BTD, x)
    return with_logical_constraint(linear.shifted(with_logical_constraint(y_BTD, STREAM)), STREAM)


def _check(products: Products) -> None:
    if products:
        raise ValueError(
            f"products={products!r} are of whole sequences, and the layout has collective_matmul; use one of"
            " them"
        )


def add_part(
    x_BTD: jax.Array, h_BTD: jax.Array, dropout: nnx.Dropout, key: jax.Array | None, post_norm: Any = None
) -> jax.Array:
    """Add what a part of a block computed to the residual stream, after `post_norm` and dropout."""
    h_BTD = checkpoint_name(h_BTD, BLOCK_OUTPUT)
    h_BTD = dropout(h_BTD if post_norm is None else post_norm(h_BTD), rngs=key)
    return compute_once(with_logical_constraint(x_BTD + h_BTD, STREAM))


def split_key(key: jax.Array | None, num: int) -> Any:
    """Split a key of dropout; without one (dropout is off) there is none for each part."""
    return [None] * num if key is None else jax.random.split(key, num)
