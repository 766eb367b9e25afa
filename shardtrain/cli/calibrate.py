"""`shardtrain calibrate`: measure this machine's devices, as lines of a cluster file (`shardtrain plan`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from shardtrain.doctor.rates import best, measure
from shardtrain.plan.devices import GB, TERA
from shardtrain.system import terminal

SMALL = 8
"""Elements of an array whose kernels take next to no time."""

KERNELS = 64
"""Kernels of a program of such arrays."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Measure one device of this machine: matrix products, memory, and the time of a small kernel.

    Args:
      dtype: of matrix products: float32 or bfloat16, as the run computes.
    """

    dtype: str = "float32"


def main(arguments: Sequence[str]) -> int:
    """Print a table `device` for a kind of islands; return 0."""
    import jax

    options = tyro.cli(CalibrateOptions, args=list(arguments), prog="shardtrain calibrate")
    if options.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype is {options.dtype}; use float32 or bfloat16")
    device = jax.local_devices()[0]
    rates = measure(device)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    lines = {
        "teraflops": rates[options.dtype] / TERA,
        "memory_gb_per_second": rates["memory"] / GB,
        "kernel_us": 1e6 * kernel_seconds(device),
        **({} if memory is None else {"memory_gb": memory / GB}),
    }
    terminal.out(
        f"# {device.device_kind}, products in {options.dtype}; put it below [[islands]] of a cluster file\n"
    )
    terminal.out("[islands.device]\n" + "".join(f"{name} = {value:.4g}\n" for name, value in lines.items()))
    return 0


def kernel_seconds(device: Any) -> float:
    """Return the seconds of a kernel that does next to nothing, in a program of many."""
    import jax
    import jax.numpy as jnp

    def chain(x: Any) -> Any:
        # a sum over all elements cannot be fused with the next one
        for _ in range(KERNELS):
            x = x + jnp.cumsum(x)
        return x

    x = jax.device_put(jnp.ones(SMALL), device)
    compiled = jax.jit(chain)
    return best(lambda: jax.block_until_ready(compiled(x))) / KERNELS
