"""Rewrite computations that XLA compiles badly for a single CPU device.

On other devices, and if several devices share a replica, models stay as they are written. Figures:
docs/benchmarks/torch.md.
"""

import math

import jax
import jax.numpy as jnp

from shardtrain.models.kernel_product import kernel_product
from shardtrain.models.target import is_on_one_device, target_devices


def is_on_one_cpu() -> bool:
    """Return whether the traced program, or its replica of the model, will run on one CPU device."""
    devices = target_devices()
    if not devices or any(device.device_kind != "cpu" for device in devices):
        return False
    return is_on_one_device()


def compute_once(x: jax.Array) -> jax.Array:
    """Return an array unchanged; on one CPU, compute it and its gradient only once.

    XLA copies elementwise operations into every loop that reads them, so each reader of the gradient of the
    residual stream would sum it again over all later blocks. `system.xla_flags.step_options` keep the
    barrier; without them it has no effect.
    """
    return jax.lax.optimization_barrier(x) if is_on_one_cpu() else x


def product(x: jax.Array, kernel: jax.Array, num_in: int) -> jax.Array:
    """Multiply the last `num_in` dims of `x` with the first of a kernel: (..., in) to (..., out)."""
    if not is_on_one_cpu():
        return jnp.tensordot(x, kernel, num_in)
    rows, out = x.shape[: x.ndim - num_in], kernel.shape[num_in:]
    matrix = kernel.reshape(math.prod(kernel.shape[:num_in]), math.prod(out))
    return kernel_product(x.reshape(*rows, len(matrix)), matrix).reshape(*rows, *out)
