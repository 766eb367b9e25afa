"""Assign gradients to the buckets in which they are transferred to other islands. No jax.

Owns the assignment, which every rank computes for itself from the same leaves; what crosses, and
when, is in `transfer.py`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardtrain.errors.messages import refuse

CAP_BYTES = 25 << 20
FIRST_BYTES = 1 << 20
"""The defaults of PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array to be transferred.

    Args:
      num_bytes: how long it is.
      dtype: the name of its dtype.
      unit: leaves with the same label stay together, such as the layers of a group that is combined
        as one; None: it goes for itself.
    """

    num_bytes: int
    dtype: str
    unit: Hashable | None = None


@dataclass(frozen=True, kw_only=True)
class BucketSizes:
    """How large the buckets of a run are.

    Args:
      cap_bytes: a bucket is closed at this size.
      first_bytes: the same of the first bucket, sent early; None: `FIRST_BYTES`, but see `assign`.
      copies_first: some island copies arrays to the host or to other processes before MPI gets them.
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
          units: a label per array; arrays of one label stay together. By default each is its own.
          is_stateless: no state is kept bucket by bucket, so their number may depend on the devices. A small
            first bucket pays only where copies overlap with MPI, and is left out where there are none.
        """
        first_bytes = self.first_bytes
        if first_bytes is None:
            first_bytes = self.cap_bytes if is_stateless and not self.copies_first else FIRST_BYTES
        labels = range(len(leaves)) if units is None else units
        described = [
            Leaf(num_bytes=leaf.size * leaf.dtype.itemsize, dtype=str(leaf.dtype), unit=label)
            for leaf, label in zip(leaves, labels, strict=True)
        ]
        return assign_buckets(described, self.cap_bytes, first_bytes)


@dataclass
class _Open:
    """The open bucket of one kind, and the number of closed ones of that kind."""

    indices: list[int] = field(default_factory=list)
    num_bytes: int = 0
    num_closed: int = 0


def assign_buckets(
    leaves: Sequence[Leaf], cap_bytes: int = CAP_BYTES, first_bytes: int = FIRST_BYTES
) -> list[list[int]]:
    """Assign leaves to buckets as PyTorch's DistributedDataParallel does.

    Leaves are taken in reverse, for gradients of the last layers are ready first; a unit is ready
    with the last of its leaves. Each goes into the open bucket of its dtype, which is closed as soon
    as it holds its cap or more: the leaf that overflows still goes in. The first bucket of a dtype
    has a small cap, so that something crosses early. A unit of several dtypes goes with others of
    the same dtypes.

    Args:
      leaves: in the order of the tree.
      cap_bytes: the largest size of all buckets but the first; 0 gives each leaf (or unit) a bucket of its
        own.
      first_bytes: the largest size of the first bucket of each dtype, if that is smaller.

    Returns:
      Indices of leaves, bucket by bucket in the order in which they are ready.

    Raises:
      ValueError: a number of bytes below 0.

    Source: `compute_bucket_assignment_by_size` and the rebuilding of buckets in PyTorch's reducer.cpp;
    Li et al. 2020, PyTorch Distributed, section 3.2. There what is open at the end comes last, in the
    order of a hash table; here all buckets are in the order in which their last leaf is ready.

    >>> layers = [Leaf(num_bytes=100, dtype="float32") for _ in range(6)]
    >>> assign_buckets(layers, cap_bytes=250, first_bytes=100)
    [[5], [4, 3, 2], [1, 0]]
    """
    _check(leaves, cap_bytes, first_bytes)
    caps = (min(first_bytes, cap_bytes), cap_bytes)
    closed: list[list[int]] = []
    buckets: dict[tuple[str, ...], _Open] = {}

    def close(bucket: _Open) -> None:
        closed.append(bucket.indices)
        bucket.indices, bucket.num_bytes = [], 0
        bucket.num_closed += 1

    # fill buckets in the order in which gradients are ready
    for unit in _units(leaves):
        kind = tuple(sorted({leaves[index].dtype for index in unit}))
        bucket = buckets.setdefault(kind, _Open())
        bucket.indices += unit
        bucket.num_bytes += sum(leaves[index].num_bytes for index in unit)
        if bucket.num_bytes >= caps[min(bucket.num_closed, 1)]:
            close(bucket)
    # whatever is still open at the end is sent, too
    for bucket in buckets.values():
        if bucket.indices:
            close(bucket)
    # a bucket can be sent once its last leaf is ready
    return sorted(closed, key=lambda indices: -indices[-1])


def _units(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Groups of leaves that stay together, each in the order in which its leaves are ready."""
    units: dict[tuple[str, Hashable], list[int]] = {}
    for index in reversed(range(len(leaves))):
        unit = leaves[index].unit
        units.setdefault(("leaf", index) if unit is None else ("unit", unit), []).append(index)
    return sorted(units.values(), key=lambda indices: -indices[-1])


def _check(leaves: Sequence[Leaf], cap_bytes: int, first_bytes: int) -> None:
    problems = [
        f"{name} is {value}; use 0 or more bytes"
        for name, value in (("cap_bytes", cap_bytes), ("first_bytes", first_bytes))
        if value < 0
    ]
    problems += [
        f"leaf {index} has {leaf.num_bytes} bytes; use 0 or more"
        for index, leaf in enumerate(leaves)
        if leaf.num_bytes < 0
    ]
    refuse("leaves cannot be put into buckets", problems)
