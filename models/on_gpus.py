"""Rewrite computations that XLA compiles badly for GPUs.

On other devices models stay as they are written. Figures: docs/benchmarks/gpu.md. Next: `one_cpu.py`, which
does the same for a CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from shardtrain.models.target import target_platform


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


def rows_last(x: jax.Array) -> jax.Array:
    """Return an array unchanged; on GPUs it and its gradient are stored with the last dim contiguous.

    A sum over a first dim of 32 or more, such as the gradient of a table of positions, makes XLA store its
    operand with this dim contiguous, and with it all arrays that are computed elementwise from it or into it:
    here the whole residual stream, which is then transposed before and after each matrix product.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if is_on_gpus() else x
