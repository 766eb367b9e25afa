"""Compute matrix products of the blocks, in the compute dtype or with operands in 8 bits.

In 8 bits (float8_e4m3fn) the features of a token, and a kernel as a whole, are divided by a scale, so that
their largest absolute value becomes the largest of the format, and rounded; products are summed in float32.
Scales are computed from the values at hand ("current scaling"), so there is no state; each token has its own
scale, so that results do not depend on how a batch is split. This applies to the output of a layer and the
gradient of its input. The gradient of a kernel, a sum over tokens with different scales, is in the compute
dtype.

References:
  Micikevicius et al. 2022, FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433, sections 3 and 4.
  TorchAO, float8 training, recipe "rowwise_with_gw_hp":
  https://github.com/pytorch/ao/tree/main/torchao/float8.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jax import lax

from shardtrain.models.ops import Ops

Products = Literal["", "float8"]
Dims = tuple[str | None, ...]

FORMAT = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FORMAT).max)


def multiply(
    ops: Ops, x: jax.Array, kernel: jax.Array, dims: Dims, num_in: int, products: Products
) -> jax.Array:
    """Multiply the last `num_in` dims of `x` with the first of a kernel.

    Args:
      ops: the operations of the model.
      x: (..., in), in the compute dtype.
      kernel: (in, out), in the compute dtype, sharded as it is stored.
      dims: names of the kernel's dims; it is gathered to them before the product, with "float8" in 8 bits.
      num_in: number of dims of in.
      products: "float8", or "" for the compute dtype.

    Returns:
      (..., out), in the compute dtype.
    """
    if not products:
        return ops.multiply(x, with_logical_constraint(kernel, dims), num_in)
    return _multiply_float8(x, kernel, dims, num_in)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _multiply_float8(x: jax.Array, kernel: jax.Array, dims: Dims, num_in: int) -> jax.Array:
    return _forward(x, kernel, dims, num_in)[0]


def _forward(x: jax.Array, kernel: jax.Array, dims: Dims, num_in: int) -> tuple[jax.Array, tuple]:
    kernel8, kernel_scale = round_values(kernel, kernel.ndim)
    kernel8, kernel_scale = with_logical_constraint(kernel8, dims), kernel_scale.reshape(())
    y = _multiply_rounded(x, kernel8, kernel_scale, num_in, range(num_in))
    return y, (x, kernel8, kernel_scale)


def _backward(dims: Dims, num_in: int, kept: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel8, kernel_scale = kept
    dx = _multiply_rounded(dy, kernel8, kernel_scale, kernel8.ndim - num_in, range(num_in, kernel8.ndim))
    # summed over all dims of tokens
    tokens = tuple(range(x.ndim - num_in))
    return dx, with_logical_constraint(lax.dot_general(x, dy, ((tokens, tokens), ((), ()))), dims)


_multiply_float8.defvjp(_forward, _backward)


def _multiply_rounded(
    x: jax.Array, kernel8: jax.Array, kernel_scale: jax.Array, num_features: int, kernel_axes: range
) -> jax.Array:
    """Multiply the last `num_features` dims of `x`, rounded token by token, with dims of a kernel."""
    x8, x_scale = round_values(x, num_features)
    axes = tuple(range(x.ndim - num_features, x.ndim)), tuple(kernel_axes)
    y = lax.dot_general(x8, kernel8, (axes, ((), ())), preferred_element_type=jnp.float32)
    # a scale for each token
    x_scale = x_scale.reshape(*x.shape[: x.ndim - num_features], *[1] * (kernel8.ndim - num_features))
    return (y * (x_scale * kernel_scale)).astype(x.dtype)


def round_values(x: jax.Array, num_dims: int) -> tuple[jax.Array, jax.Array]:
    """Round to 8 bits with a scale for all values along the last `num_dims` dims.

    Returns:
      The rounded values, float8_e4m3fn, and the scale, float32, with these dims of size 1; their product
      approximates `x`. Zeros stay zeros; a value that is not finite makes all values along the dims NaN.

    >>> values, scale = round_values(jnp.array([[1.0, -3.5], [0.0, 0.0]]), 1)
    >>> (values.astype(jnp.float32) * scale).tolist()
    [[1.0, -3.5], [0.0, 0.0]]
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=tuple(range(x.ndim - num_dims, x.ndim)), keepdims=True)
    # a smaller scale would be rounded to 0, and all values to NaN
    scale = jnp.maximum(largest / LARGEST, jnp.finfo(jnp.float32).tiny)
    return (x / scale).astype(FORMAT), scale
