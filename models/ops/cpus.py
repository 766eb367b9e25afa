"""Forms that XLA compiles well for CPUs (docs/decisions/0055).

Figures: docs/benchmarks/torch.md; with the forms for one CPU a small decoder takes 1.07 times as long as with
torch, without them 1.4 times.
"""

import math

import jax

from shardtrain.models.ops.kernel_product import kernel_product
from shardtrain.models.ops.plain import Ops


class CpuOps(Ops):
    """Forms for CPU devices: a ragged product costs there as much as if all experts computed all tokens."""

    has_expert_blocks = True


class OneCpuOps(CpuOps):
    """Forms for a replica of the model on one CPU device.

    `system.xla_flags.step_options` keep the barriers of `compute_once`; without them they have no effect.
    """

    most_unrolled = 8

    def multiply(self, x: jax.Array, kernel: jax.Array, num_in: int) -> jax.Array:
        """Multiply by a product whose gradient reaches XLA's matrix library, see `kernel_product`."""
        rows, out = x.shape[: x.ndim - num_in], kernel.shape[num_in:]
        matrix = kernel.reshape(math.prod(kernel.shape[:num_in]), math.prod(out))
        return kernel_product(x.reshape(*rows, len(matrix)), matrix).reshape(*rows, *out)

    def compute_once(self, x: jax.Array) -> jax.Array:
        """Return an array unchanged; it and its gradient are computed once.

        XLA copies elementwise operations into every loop that reads them, so each reader of the gradient of
        the residual stream would sum it again over all later blocks.
        """
        return jax.lax.optimization_barrier(x)
