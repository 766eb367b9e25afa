"""Read from the residual stream (batch, seq, embed), and add to it.

If sequences are sharded over tensor between blocks, inputs of blocks are gathered and their outputs are
reduce-scattered: by the compiler, or by the run during the matrix product (docs/decisions/0058).
"""

from typing import Any

import jax
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from shardtrain.axes import BATCH, EMBED, RESIDUAL_SEQ, SEQ
from shardtrain.functional.remat_policies import BLOCK_OUTPUT, WHOLE_SEQ
from shardtrain.models.float8 import Dims, Products, multiply
from shardtrain.models.ops import Ops

STREAM = (BATCH, RESIDUAL_SEQ, EMBED)


def gather_sequence(x_BTD: jax.Array) -> jax.Array:
    """All-gather a norm's output, which was computed on shards of the sequence.

    Both constraints are needed: the backward pass then reduces the norm's bias from shards. The checkpoint
      name
    lets remat "weights" keep the output instead of gathering it again.
    """
    x_BTD = with_logical_constraint(with_logical_constraint(x_BTD, STREAM), (BATCH, SEQ, EMBED))
    return checkpoint_name(x_BTD, WHOLE_SEQ)


def read_by_products(ops: Ops, x_BTD: jax.Array) -> jax.Array:
    """Return the input of `read_from_stream`: gathered, unless the run gathers it during the product."""
    return gather_sequence(x_BTD) if ops.matmul is None else with_logical_constraint(x_BTD, STREAM)


def gather(ops: Ops, x_BTD: jax.Array) -> jax.Array:
    """Return the whole sequence of a result of `read_by_products`, for computations other than products."""
    return x_BTD if ops.matmul is None else gather_sequence(x_BTD)


def read_from_stream(
    ops: Ops, x_BTD: jax.Array, kernel: jax.Array, dims: Dims, products: Products = ""
) -> jax.Array:
    """Multiply the input of a block with a kernel.

    Args:
      ops: the operations of the model.
      x_BTD: the result of `read_by_products`.
      kernel: (embed, ...), in the compute dtype, sharded as it is stored.
      dims: names of the kernel's dims for the product.
      products: see `float8.product`.

    Returns:
      (batch, seq, ...), for the whole sequence.

    Raises:
      ValueError: products are in 8 bits, and the run gathers sequences during products.
    """
    if ops.matmul is not None:
        _check(products)
        y = ops.matmul.gathered(x_BTD, with_logical_constraint(kernel, dims), dims)
        if y is not None:
            return y
    return multiply(ops, gather(ops, x_BTD), kernel, dims, 1, products)


def project_to_stream(ops: Ops, linear: Any, x: jax.Array) -> jax.Array:
    """Project onto the residual stream, with a reduction over tensor or a reduce-scatter of the sequence.

    Args:
      ops: the operations of the model.
      linear: `layers.Linear`, or an object with its fields and methods.
      x: (batch, seq, ...), the input of the projection.
    """
    y_BTD = None
    if ops.matmul is not None:
        _check(linear.products)
        dims = (*linear.into, *linear.out)
        y_BTD = ops.matmul.multiply_scattered(x, with_logical_constraint(linear.cast(), dims), dims)
    if y_BTD is None:
        # constrained unsharded first, so that the backward pass gathers its gradient once
        y_BTD = with_logical_constraint(linear.product(x), (BATCH, SEQ, EMBED))
    else:
        y_BTD = linear.add_adapter(y_BTD, x)
    return with_logical_constraint(linear.add_bias(with_logical_constraint(y_BTD, STREAM)), STREAM)


def _check(products: Products) -> None:
    if products:
        raise ValueError(
            f"products={products!r} need whole sequences, and the layout has collective_matmul; use only one"
            " of them"
        )


def add_part(
    ops: Ops,
    x_BTD: jax.Array,
    h_BTD: jax.Array,
    dropout: nnx.Dropout,
    key: jax.Array | None,
    post_norm: Any = None,
) -> jax.Array:
    """Add the output of a part of a block to the residual stream, after `post_norm` and dropout."""
    h_BTD = checkpoint_name(h_BTD, BLOCK_OUTPUT)
    h_BTD = dropout(h_BTD if post_norm is None else post_norm(h_BTD), rngs=key)
    return ops.compute_once(with_logical_constraint(x_BTD + h_BTD, STREAM))


def split_key(key: jax.Array | None, num: int) -> Any:
    """Split a key of dropout; without dropout return `num` times None."""
    return [None] * num if key is None else jax.random.split(key, num)
