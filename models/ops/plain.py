"""What a model computes with: plain jax, and what a run replaces. Next: `cpus.py` and `gpus.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Ops:
    """The operations of a model that depend on its mesh and devices; the defaults are plain jax.

    A module keeps them as the attribute `ops`, so they are part of its structure: a traced function is traced
    again for other operations. Subclasses are the forms that XLA compiles well for some devices.

    Attributes:
      attention: (attention over whole sequences, queries, keys, values, **`ScoreOptions`) -> the context,
        where a mesh shards sequences. None computes whole sequences.
      experts: (the layer's `LocalExperts`, tokens, choice, kernels) -> sums, where a mesh shards experts or
        tokens. None computes all experts here.
      matmul: products that exchange parts of a sequence, see `functional.collective_matmul`. None computes
        whole products.
      devices: the devices of this process that will run the program, for the choice of an attention. None
        means that they are unknown.
      replace_attention: (name, attend) -> what is traced in place of an entry of `ATTENTIONS`, in a plan.
        None replaces nothing.
      note: receives a line about the attention that is chosen. None disables it.
    """

    attention: Callable[..., jax.Array] | None = None
    experts: Callable[..., jax.Array] | None = None
    matmul: Any = None
    devices: tuple[Any, ...] | None = None
    replace_attention: Callable[..., Any] | None = None
    note: Callable[[str], None] | None = None

    has_expert_blocks = False
    """Whether the tokens of experts without a capacity are in blocks of one expert each, instead of ragged
    products."""
    joins_heads = False
    """Whether queries, keys and values are joined as one group of heads, instead of one for each key head."""
    keeps_products = False
    """Whether the scan with remat="weights" keeps everything that is not elementwise."""
    most_unrolled = 0
    """Largest number of blocks whose scan is unrolled; with 0 blocks are never plain code."""

    def multiply(self, x: jax.Array, kernel: jax.Array, num_in: int) -> jax.Array:
        """Multiply the last `num_in` dims of `x` with the first of a kernel: (..., in) to (..., out)."""
        return jnp.tensordot(x, kernel, num_in)

    def recompute(
        self, function: Callable[..., Any], derived: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return an elementwise function or a norm, which the backward pass may compute again.

        Args:
          function: a function of arrays, which are kept; parameters that a mesh shards are gathered before.
          derived: the same function in a form with a faster derivative on GPUs; None means the function
            itself.
        """
        return function

    def keep_last_contiguous(self, x: jax.Array) -> jax.Array:
        """Return an array unchanged; it and its gradient may be stored with the last dim contiguous."""
        return x

    def compute_once(self, x: jax.Array) -> jax.Array:
        """Return an array unchanged, which all its readers read, instead of computing it again."""
        return x

    def tanh_gelu(self, x: jax.Array) -> jax.Array:
        """Compute gelu with its tanh approximation."""
        return jax.nn.gelu(x, approximate=True)


PLAIN = Ops()


class WithOps(nnx.Module):
    """A module that computes with `ops`, which a run sets in every call (`set_ops`)."""

    ops: Ops = PLAIN


def set_ops(module: Any, ops: Ops) -> Any:
    """Return an nnx module after all modules in it that compute with `Ops` are given these."""
    for _, each in nnx.iter_modules(module):
        if isinstance(each, WithOps):
            each.ops = ops
    return module
