"""Fuse sums with kernels that read the same arrays, as compilers for GPUs do. No jax.

Compilers for GPUs join a sum with another sum, or with a chain of elementwise operations, that reads the same
array or makes it. Next: `program_cost.py`, which counts the passes that are left.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardtrain.plan.fusion import LOOKUP, MATERIAL
from shardtrain.plan.named_dims import REDUCTIONS
from shardtrain.plan.program import Kernel

APART = MATERIAL | {LOOKUP, "sharding_constraint"}
"""Kernels that are fused with no other."""


def shared_passes(kernels: Sequence[Kernel], sizes: Sequence[Any]) -> list[Kernel]:
    """Return the kernels, each sum joined with an earlier pass over the largest array that it reads.

    A chain is joined with an earlier sum likewise. What waits for the result of a sum is not joined with it.

    Args:
      kernels: in order.
      sizes: of each array, in bytes on one device for each of several shardings.
    """
    found: list[Kernel] = []
    sums: set[int] = set()
    # array -> the position in `found` of the kernel that makes it
    made: dict[int, int] = {}
    first = 0
    for kernel in kernels:
        position = _host(kernel, found, first, made, sums, sizes)
        if position is None:
            position = len(found)
            found.append(kernel)
        else:
            found[position] = _joined(found[position], kernel)
        made.update(dict.fromkeys(kernel.writes, position))
        if kernel.name in REDUCTIONS:
            sums.update(kernel.writes)
        if kernel.body is not None:
            first = len(found)
    return found


def _host(
    kernel: Kernel,
    found: Sequence[Kernel],
    first: int,
    made: dict[int, int],
    sums: set[int],
    sizes: Sequence[Any],
) -> int | None:
    """Return the position of the kernel, from `first` on, that this one is joined with; None: of none."""
    if not _can_join(kernel) or not kernel.reads:
        return None
    largest = max(kernel.reads, key=lambda i: float(sizes[i].max()))
    # it cannot run before what it reads is there; of a chain its elements are, and of a sum they are not
    ready = max((made.get(i, -1) + (i in sums) for i in kernel.reads), default=-1)
    is_sum = kernel.name in REDUCTIONS
    for position in range(len(found) - 1, max(ready, first) - 1, -1):
        host = found[position]
        one_sums = is_sum or sums.issuperset(host.writes)
        if one_sums and _can_join(host) and largest in (*host.reads, *host.writes):
            return position
    return None


def _can_join(kernel: Kernel) -> bool:
    return kernel.body is None and kernel.call is None and kernel.name not in APART


def _joined(host: Kernel, kernel: Kernel) -> Kernel:
    reads = dict.fromkeys((*host.reads, *(i for i in kernel.reads if i not in host.writes)))
    return replace(
        host, reads=tuple(reads), writes=(*host.writes, *kernel.writes), dims=host.dims | kernel.dims
    )
