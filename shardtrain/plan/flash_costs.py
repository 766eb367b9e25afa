"""What flash attention costs a device: a kernel that keeps no scores. No jax.

Next: `traced_attention.py`, which puts such calls in the place of the kernel of a GPU that is not here.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shardtrain.plan.program import CallCost, CallSizes, DeviceCall, Program

PRODUCTS, COUNTED = (2, 5), (2, 4)
"""Products of queries and keys forward and backward: those of the kernel, whose backward computes the scores
again (Dao et al. 2022, https://arxiv.org/abs/2205.14135, algorithms 1 and 4); those of the model's flops."""

FLOAT = 4
"""Bytes of an element of the gradient of the queries, which the backward adds up over blocks of keys."""


class FlashCall(NamedTuple):
    """Flash attention of one device, forward or backward.

    It reads queries, keys and values and writes the context and the sums of its softmax; backward it also
    reads these two and a cotangent, and writes three gradients.

    Args:
      queries, keys: positions of the whole sequences.
      head_dim: features of a head.
      item_bytes: of an element of queries and keys.
      causal: whether queries see keys up to their own position alone; the kernel skips blocks of others.
      window: of causal attention, how many keys a query sees at most; None: any number.
      softmax_features: see `data_sheet.Reached`.
      backward: whether it is the gradient.
    """

    queries: int
    keys: int
    head_dim: int
    item_bytes: int
    causal: bool
    window: int | None
    softmax_features: float
    backward: bool = False

    linear = completes = False

    def after(self, earlier: Iterable[DeviceCall]) -> "FlashCall":
        """Return the call itself: it shares nothing with others."""
        return self

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return what one call costs; see `DeviceCall`.

        Its flops are those of a program without the kernel, all scores counted, as MFU counts them.
        """
        elements = sizes.reads[0] / self.item_bytes
        # of one product of all queries and keys
        whole = 2 * elements * self.keys
        slower = 1 + self.softmax_features / self.head_dim
        gradient = self.backward * FLOAT * elements
        return CallCost(
            flops=COUNTED[self.backward] * whole,
            moved_bytes=2 * gradient,
            temporary_bytes=gradient,
            sent=(),
            timed_flops=PRODUCTS[self.backward] * whole * self.seen_part() * slower,
        )

    def seen_part(self) -> float:
        """Return the part of all pairs of queries and keys that are computed.

        >>> FlashCall(4, 4, 64, 2, causal=True, window=None, softmax_features=0).seen_part()
        0.625
        """
        if not self.causal:
            return 1.0
        most = min(self.keys, self.window or self.keys)
        growing = min(most, self.queries)
        return (growing * (growing + 1) / 2 + (self.queries - growing) * most) / (self.queries * self.keys)


def counts_flash(program: Program) -> bool:
    """Return whether a program, or a loop in it, has flash attention."""
    return any(
        isinstance(kernel.call, FlashCall) or (kernel.body is not None and counts_flash(kernel.body))
        for kernel in program.kernels
    )
