"""Where XLA compiles a model badly for one CPU, the same computation in another form.

On other devices, and where several share one replica, models stay as they are written. Figures:
docs/benchmarks/torch.md.
"""

import math

import jax
import jax.numpy as jnp

from shardtrain.models.kernel_product import kernel_product
from shardtrain.models.target import is_on_one_device, target_devices


def is_on_one_cpu() -> bool:
    """Whether the program that is being traced, or its replica of the model, will run on one CPU device."""
    devices = target_devices()
    if not devices or any(device.device_kind != "cpu" for device in devices):
        return False
    return is_on_one_device()


def compute_once(x: jax.Array) -> jax.Array:
    """Return an array as it is; one CPU computes it, and its gradient, once.

    XLA copies elementwise operations into every loop that reads them, so the gradient of the residual stream,
    a sum of two terms for each block above, is added up again by each of its readers. The barrier is kept by
    `system.xla_flags.step_options`; without those it changes nothing.
    """
    return jax.lax.optimization_barrier(x) if is_on_one_cpu() else x


def product(x: jax.Array, kernel: jax.Array, num_in: int) -> jax.Array:
    """Multiply the last `num_in` dims of `x` with the first of a kernel: (..., in) to (..., out)."""
    if not is_on_one_cpu():
        return jnp.tensordot(x, kernel, num_in)
    rows, out = x.shape[: x.ndim - num_in], kernel.shape[num_in:]
    matrix = kernel.reshape(math.prod(kernel.shape[:num_in]), math.prod(out))
    return kernel_product(x.reshape(*rows, len(matrix)), matrix).reshape(*rows, *out)
