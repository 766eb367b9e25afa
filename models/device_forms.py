"""Find the devices for which a model is traced, and rewrite computations that XLA compiles badly for them.

On other devices, and if several CPU devices share a replica, models stay as they are written. Figures:
docs/benchmarks/gpu.md and docs/benchmarks/torch.md.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.spmd import get_logical_axis_rules
from jax.experimental.layout import Layout, with_layout_constraint

from shardtrain.axes import DATA
from shardtrain.models.kernel_product import kernel_product


def target_devices() -> list[Any]:
    """Return the devices of this process of the kind that the traced program will run on.

    Inside a mesh they are of its kind: [] for a mesh of described devices that this process does not have.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    devices = jax.local_devices()
    return [d for d in devices if described is None or d.device_kind == described.device_kind]


def target_platform() -> str:
    """Return jax's platform of the devices that the traced program will run on, which may be described."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.local_devices()[0] if described is None else described).platform


def is_on_one_device() -> bool:
    """Return whether the traced program, or its replica of the model, will run on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    # outside of a run a model may be traced for all devices, or for a mesh to be chosen
    if mesh.empty:
        return len(jax.local_devices()) == 1
    if getattr(get_logical_axis_rules(), "any_mesh", False):
        return False
    # each device runs its own replica if the axis data is manual
    own = {DATA} & set(mesh.manual_axes)
    return all(size == 1 or axis in own for axis, size in mesh.shape.items())


def is_on_gpus() -> bool:
    """Return whether the traced program will run on GPUs, of this process or only described."""
    return target_platform() in ("gpu", "cuda", "rocm")


def recompute(function: Callable[..., Any], derived: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Let the backward pass recompute an elementwise function or a norm on GPUs; elsewhere change nothing.

    Intermediate results are then not written to memory in the forward pass and read in the backward pass,
    which takes longer on a GPU than computing them from the arguments, and in a scan is stored for each
    block.

    Args:
      function: a function of arrays, which are kept; parameters that a mesh shards are gathered before.
      derived: the same function in a form with a faster derivative on GPUs; None means the function itself.
    """
    if not is_on_gpus():
        return function
    if derived is None:
        return jax.checkpoint(function)
    of_form = jax.custom_jvp(function)
    of_form.defjvp(lambda primals, tangents: (function(*primals), jax.jvp(derived, primals, tangents)[1]))
    return jax.checkpoint(of_form)


def keep_last_contiguous(x: jax.Array) -> jax.Array:
    """Return an array unchanged; on GPUs it and its gradient are stored with the last dim contiguous.

    A sum over a first dim of 32 or more, such as the gradient of a table of positions, makes XLA store its
    operand with this dim contiguous, and with it all arrays that are computed elementwise from it or into it:
    here the whole residual stream, which is then transposed before and after each matrix product.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if is_on_gpus() else x


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


def multiply(x: jax.Array, kernel: jax.Array, num_in: int) -> jax.Array:
    """Multiply the last `num_in` dims of `x` with the first of a kernel: (..., in) to (..., out)."""
    if not is_on_one_cpu():
        return jnp.tensordot(x, kernel, num_in)
    rows, out = x.shape[: x.ndim - num_in], kernel.shape[num_in:]
    matrix = kernel.reshape(math.prod(kernel.shape[:num_in]), math.prod(out))
    return kernel_product(x.reshape(*rows, len(matrix)), matrix).reshape(*rows, *out)
