"""Calls of a device that move an array: to other devices of a mesh axis, or in its own memory. No jax."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardtrain.plan.cost import Sent
from shardtrain.plan.hlo.collectives import ALL_GATHER
from shardtrain.plan.program import CallCost, CallSizes, DeviceCall


class Moved(NamedTuple):
    """A call that moves its first input, and computes nothing but sums.

    Args:
      kind: the collective, as in `plan.hlo.collectives`; "": none.
      axis: the mesh axis that it runs over.
      linear: whether parts of a sum may pass it before they are added; of its first input alone.
      completes: whether they are added in its result.
    """

    kind: str = ""
    axis: str = ""
    linear: bool = True
    completes: bool = False

    def after(self, earlier: Iterable[DeviceCall]) -> "Moved":
        """Return the same: it moves what no other call has moved."""
        return self

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return what one call costs; see `DeviceCall`."""
        zeros = np.zeros(np.shape(sizes.reads[0]))
        if not self.kind:
            return CallCost(flops=zeros, moved_bytes=zeros, temporary_bytes=zeros, sent=())
        # of what is gathered the whole counts, of anything else what a device has before
        payload = sizes.writes[0] if self.kind == ALL_GATHER else sizes.reads[0]
        sent = Sent(self.kind, (self.axis,), payload, 1.0)  # pyright: ignore
        return CallCost(flops=zeros, moved_bytes=zeros, temporary_bytes=zeros, sent=(sent,))
