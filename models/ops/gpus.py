"""Forms that XLA compiles well for GPUs (docs/decisions/0056).

Figures: docs/benchmarks/gpu.md; with all of them a step of GPT-2 takes 61 ms on an H200, without them 87 ms.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from shardtrain.models.ops.plain import Ops


class GpuOps(Ops):
    """Forms for GPUs."""

    keeps_products = True

    def recompute(
        self, function: Callable[..., Any], derived: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Let the backward pass compute a function again.

        Intermediate results are then not written to memory in the forward pass and read in the backward pass,
        which takes longer on a GPU than computing them from the arguments, and in a scan is stored for each
        block.
        """
        if derived is None:
            return jax.checkpoint(function)
        of_form = jax.custom_jvp(function)
        of_form.defjvp(lambda primals, tangents: (function(*primals), jax.jvp(derived, primals, tangents)[1]))
        return jax.checkpoint(of_form)

    def keep_last_contiguous(self, x: jax.Array) -> jax.Array:
        """Return an array unchanged; it and its gradient are stored with the last dim contiguous.

        A sum over a first dim of 32 or more, such as the gradient of a table of positions, makes XLA store
        its operand with this dim contiguous, and with it all arrays that are computed elementwise from it or
        into it: here the whole residual stream, which is then transposed before and after each matrix
        product.
        """
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def tanh_gelu(self, x: jax.Array) -> jax.Array:
        """Compute gelu with its tanh approximation, in 16 bits by a sigmoid in float32.

        (1 + tanh z) / 2 is the sigmoid of 2 z, which needs fewer operations on a GPU, and loses no digits
        below 0.
        """
        if x.dtype == jnp.float32:
            return super().tanh_gelu(x)
        wide = x.astype(jnp.float32)
        twice_z = math.sqrt(8 / math.pi) * wide * (1 + 0.044715 * wide * wide)
        return (wide * jax.lax.logistic(twice_z)).astype(x.dtype)


class OneGpuOps(GpuOps):
    """Forms for a replica of the model on one GPU."""

    joins_heads = True
    most_unrolled = 24
