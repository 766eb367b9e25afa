"""Compute the peak bytes of the arrays that are alive in a program. No jax.

Programs for GPUs reorder kernels, and copy parts of stacked and sharded arrays. Next: `program_cost.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtrain import axes
from shardtrain.jaxpr.dims import REDUCTIONS
from shardtrain.plan.fusion import MATERIAL
from shardtrain.plan.program import Dims, Kernel, Program, Splits


class Trip(NamedTuple):
    """A trip of a loop.

    Args:
      carried: numbers of the results that the next trip needs; all others are stacked.
      parts: numbers of the inputs that are parts of stacked arrays.
      is_loop: whether several trips run in a loop, and not as plain code, for each of several shardings.
    """

    carried: Sequence[int]
    parts: Sequence[int]
    is_loop: Any


def compute_peak_bytes(
    program: Program,
    kernels: Sequence[Kernel],
    sizes: Sequence[Any],
    inside: Sequence[Any],
    copies: Mapping[int, Any],
) -> Any:
    """Return the peak bytes of live arrays, for each of several shardings.

    Args:
      program: the program; its inputs are not counted.
      kernels: its kernels, in the order in which they run.
      sizes: bytes of each array.
      inside: temporary bytes of each kernel.
      copies: input -> bytes of a copy of it, which is made for the first kernel that reads it.
    """
    last = {number: at for at, kernel in enumerate(kernels) for number in kernel.reads}
    last |= dict.fromkeys(program.outputs, len(kernels))
    sizes = [copies.get(number, size) for number, size in enumerate(sizes)]
    waiting, given = set(copies), set(program.inputs) - set(copies)
    ending: dict[int, list[int]] = {}
    for number, at in last.items():
        if number not in given:
            ending.setdefault(at, []).append(number)
    alive = peak = np.zeros(1)
    for at, kernel in enumerate(kernels):
        copied = waiting.intersection(kernel.reads)
        waiting -= copied
        alive = alive + sum(sizes[number] for number in (*copied, *kernel.writes))
        peak = np.maximum(peak, alive + inside[at])
        gone = [*ending.get(at, ()), *(number for number in kernel.writes if number not in last)]
        alive = alive - sum(sizes[number] for number in gone)
    return peak


def sort_for_gpus(kernels: Sequence[Kernel], trip: Trip | None) -> list[int]:
    """Return the positions of kernels in the order in which XLA's scheduler for GPUs runs them.

    In a trip of a loop, kernels that the next trip needs run first, each as late as another kernel needs it.
    Kernels whose results are only stacked, such as gradients of weights, run last, so that their inputs stay
    alive. Outside of loops, sums that no kernel needs run last, such as the gradients of the last norm.

    Args:
      kernels: the kernels in traced order.
      trip: the trip of a loop's body; None outside of loops.
    """
    makers = {number: at for at, kernel in enumerate(kernels) for number in kernel.writes}
    if trip is None:
        first = [at for at, kernel in enumerate(kernels) if kernel.name not in REDUCTIONS]
    else:
        first = [at for at, kernel in enumerate(kernels) if kernel.call is not None]
        first += [makers[number] for number in trip.carried if number in makers]
    found: dict[int, None] = {}
    for root in (*first, *range(len(kernels))):
        # depth first: the inputs of a kernel are made just before it
        path = [root]
        while path:
            reads = kernels[path[-1]].reads
            missing = (makers[i] for i in reads if i in makers and makers[i] not in found)
            maker = next((at for at in missing if at != path[-1]), None)
            if maker is None:
                found.setdefault(path.pop())
            else:
                path.append(maker)
    return list(found)


def count_copies_on_gpus(
    program: Program, kernels: Sequence[Kernel], sizes: Sequence[Any], splits: Splits, trip: Trip | None
) -> dict[int, Any]:
    """Return the bytes of the copies that a program for GPUs makes of its inputs.

    A trip of a loop copies or gathers its part of a stacked array. Outside of loops, sharded weights are
    gathered whole. Stacked weights are not gathered, but transposed if their blocks are gathered along
    another dim than the first, as XLA gathers along the first.

    Args:
      program: the program.
      kernels: its kernels.
      sizes: bytes of each array.
      splits: how it is sharded.
      trip: the trip of a loop's body; None outside of loops.

    Returns:
      Input -> bytes, for each of several shardings.
    """
    found = {}
    for number in program.inputs if trip is None else trip.parts:
        dims = program.arrays[number].dims
        used = splits.mask(dims)

        def gathered(dims: Dims, used: Any = used) -> Any:
            return (splits.mask(dims, True) & ~used).any(axis=1)

        if trip is not None:
            readers = [kernel for kernel in kernels if number in kernel.reads]
            is_copied = any(k.name in MATERIAL and k.call is None for k in readers) or len(readers) > 1
            found[number] = np.where(gathered(dims) | (is_copied & trip.is_loop), sizes[number], 0.0)
        elif dims[:1] == (axes.LAYERS,):
            stored = program.arrays[number].num_bytes / splits.parts(dims, True)
            found[number] = np.where(gathered(dims[2:]), stored, 0.0)
        else:
            found[number] = np.where(gathered(dims), sizes[number], 0.0)
    return found
