"""Assign gradients to the buckets in which islands exchange them. No jax.

Every rank computes the same assignment from the same leaves. Next: `transfer.py`, which sends the buckets.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

CAP_BYTES = 25 << 20
FIRST_BYTES = 1 << 20
"""The defaults of PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True)
class BucketSizes:
    """The sizes of the buckets of a run.

    Args:
      cap_bytes: size at which a bucket is closed.
      first_bytes: size at which the first bucket is closed, so that sending starts early; None means
        `FIRST_BYTES`, but see `assign`.
      copies_first: whether some island copies arrays to the host or to other processes before it calls MPI.
    """

    cap_bytes: int = CAP_BYTES
    first_bytes: int | None = None
    copies_first: bool = False

    def assign(
        self, leaves: Sequence[Any], units: Sequence[Hashable] | None = None, *, is_stateless: bool = False
    ) -> list[list[int]]:
        """Assign arrays to buckets, in the order of their transfer.

        Args:
          leaves: arrays or shapes.
          units: see `assign_buckets`.
          is_stateless: whether no state is kept per bucket, so that their number may depend on the devices. A
            small first bucket pays only if copies overlap with MPI, and is omitted otherwise.
        """
        first_bytes = self.first_bytes
        if first_bytes is None:
            first_bytes = self.cap_bytes if is_stateless and not self.copies_first else FIRST_BYTES
        return assign_buckets(leaves, units, self.cap_bytes, first_bytes)


@dataclass
class _OpenBucket:
    """The open bucket of one kind, and the number of closed buckets of that kind."""

    indices: list[int] = field(default_factory=list)
    num_bytes: int = 0
    num_closed: int = 0


def assign_buckets(
    leaves: Sequence[Any],
    units: Sequence[Hashable | None] | None = None,
    cap_bytes: int = CAP_BYTES,
    first_bytes: int = FIRST_BYTES,
) -> list[list[int]]:
    """Assign leaves to buckets as PyTorch's DistributedDataParallel does.

    Leaves are taken in reverse, because gradients of the last layers are ready first; a unit is ready with
    its last leaf. Each goes into the open bucket of its dtype, which is closed as soon as it holds its cap or
    more: the leaf that overflows is included. The first bucket of a dtype has a small cap, so that sending
    starts early. A unit of several dtypes shares buckets with units of the same dtypes.

    Args:
      leaves: arrays or shapes, in the order of the tree.
      units: a label for each leaf; leaves of one label stay together. None, as a label too, means that each
        leaf is a unit.
      cap_bytes: the largest size of all buckets but the first; 0 gives each leaf (or unit) a bucket of its
        own.
      first_bytes: the largest size of the first bucket of each dtype, if that is smaller.

    Returns:
      Indices of leaves, bucket by bucket in the order in which they are ready.

    Source: `compute_bucket_assignment_by_size` and the rebuilding of buckets in PyTorch's reducer.cpp;
    Li et al. 2020, PyTorch Distributed, section 3.2. There buckets that are open at the end come last, in
    the order of a hash table; here all buckets are in the order in which their last leaf is ready.

    >>> import numpy as np
    >>> layers = [np.zeros(25, np.float32)] * 6
    >>> assign_buckets(layers, cap_bytes=250, first_bytes=100)
    [[5], [4, 3, 2], [1, 0]]
    """
    caps = (min(first_bytes, cap_bytes), cap_bytes)
    closed: list[list[int]] = []
    buckets: dict[tuple[str, ...], _OpenBucket] = {}

    def close(bucket: _OpenBucket) -> None:
        closed.append(bucket.indices)
        bucket.indices, bucket.num_bytes = [], 0
        bucket.num_closed += 1

    # fill buckets in the order in which gradients are ready
    for unit in _group_units(len(leaves), units):
        kind = tuple(sorted({str(leaves[index].dtype) for index in unit}))
        bucket = buckets.setdefault(kind, _OpenBucket())
        bucket.indices += unit
        bucket.num_bytes += sum(leaves[index].size * leaves[index].dtype.itemsize for index in unit)
        if bucket.num_bytes >= caps[min(bucket.num_closed, 1)]:
            close(bucket)
    # whatever is still open at the end is sent, too
    for bucket in buckets.values():
        if bucket.indices:
            close(bucket)
    # a bucket can be sent once its last leaf is ready
    return sorted(closed, key=lambda indices: -indices[-1])


def _group_units(num_leaves: int, units: Sequence[Hashable | None] | None) -> list[list[int]]:
    """Group the leaves that stay together, each group in the order in which its leaves are ready."""
    groups: dict[Any, list[int]] = {}
    for index in reversed(range(num_leaves)):
        label = None if units is None else units[index]
        groups.setdefault(("leaf", index) if label is None else ("unit", label), []).append(index)
    return sorted(groups.values(), key=lambda indices: -indices[-1])
