"""Fuse traced operations into kernels, as compilers do. No jax.

Elementwise operations become parts of chains: only what a matrix product, a loop or the result needs is
written to memory. Next: `jaxpr_walk.py`, which finds the operations.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from shardtrain.plan.named_dims import REDUCTIONS
from shardtrain.plan.program import Array, DeviceCall, Kernel, Program, Resharded

ALIASES = frozenset(
    (
        *("copy", "copy_p", "expand_dims", "name", "optimization_barrier", "reduce_precision", "reshape"),
        *("sharding_constraint", "squeeze", "stop_gradient"),
    )
)
"""Operations that give an array another name or shape, and move nothing."""

MATERIAL = frozenset(
    (
        *("cholesky", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"),
        *("custom_call", "dot_general", "ffi_call", "fft", "gather", "ragged_dot_general", "random_bits"),
        *("device_call", "pallas_call", "reduce", "reduce_window", "reduce_window_max", "reduce_window_min"),
        *("reduce_window_sum", "scatter", "scatter-add", "select_and_gather_add", "select_and_scatter_add"),
        *("sort", "threefry2x32", "top_k", "triangular_solve"),
    )
)
"""Operations that are kernels of their own: they read arrays from memory and write their results to it."""

EXPENSIVE = frozenset(
    (
        *("cos", "erf", "erf_inv", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "sin", "tan"),
        "tanh",
    )
)
"""Elementwise operations that compilers do not compute twice, so that a result used twice is written; those
for GPUs do, as memory takes longer."""

LOOKUP = "gather"
"""The lookup of rows in a table. A GPU reads these rows alone, or computes them alone where the table is the
result of elementwise operations."""


@dataclass(kw_only=True)
class Step:
    """An operation before fusion; its arrays are numbers.

    Args:
      name: of its primitive.
      reads, writes: its arrays.
      flops: of a matrix product or a convolution.
      summed: the names of the dims that it sums over.
      body, trips, unrolled, over: of a loop, as in `Kernel`.
      call: of a call that is left closed, as in `Kernel`.
      grouped: the names of dims of its arrays that its work is not over.
    """

    name: str
    reads: Sequence[int]
    writes: Sequence[int]
    flops: float = 0.0
    summed: tuple[str, ...] = ()
    body: Program | None = None
    trips: int = 1
    unrolled: bool = False
    over: str | None = None
    call: DeviceCall | None = None
    grouped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unfused:
    """The operations of a computation.

    Args:
      arrays: all arrays.
      steps: the operations, in order.
      same: number of an array -> that of the array of which it is another view.
      constants: arrays that are computed from constants alone; compilers make them where they are read.
      resharded: activations whose sharding may change.
      for_gpus: whether they are fused as for GPUs.
    """

    arrays: Sequence[Array]
    steps: Sequence[Step]
    same: Mapping[int, int]
    constants: Set[int]
    resharded: Sequence[Resharded]
    for_gpus: bool = False

    def root(self, number: int) -> int:
        """Return the number of the array in memory of which this is a view."""
        return root(self.same, number)


def root(same: Mapping[int, int], number: int) -> int:
    """Return the number of the array in memory of which this is a view.

    >>> root({3: 2, 2: 0}, 3)
    0
    """
    while number in same:
        number = same[number]
    return number


def fuse(given: Unfused, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
    """Return the program of fused operations.

    Args:
      given: the operations.
      inputs, outputs: numbers of the arrays that are there before, and of the results.
    """
    return Program(
        arrays=tuple(given.arrays),
        inputs=tuple(inputs),
        outputs=tuple(given.root(i) for i in outputs),
        kernels=tuple(_kernels(given, _find_written(given, inputs, outputs))),
        resharded=tuple(
            each if each.source is None else replace(each, source=given.root(each.source))
            for each in given.resharded
        ),
        for_gpus=given.for_gpus,
    )


def _kernels(given: Unfused, written: Set[int]) -> Iterator[Kernel]:
    # number of an array inside a chain -> the arrays in memory that it is computed from
    sources: dict[int, tuple[int, ...]] = {}
    for step in given.steps:
        if all(i in given.same for i in step.writes):
            continue
        roots = [given.root(i) for i in step.reads]
        reads = dict.fromkeys(j for i in roots for j in ((i,) if i in written else sources.get(i, ())))
        sources.update((i, tuple(reads)) for i in step.writes if i not in written)
        results = tuple(i for i in step.writes if i in written)
        if results or step.body is not None:
            operands = roots if step.call is not None else ()
            looked_up: Sequence[int] = ()
            if given.for_gpus and step.name == LOOKUP:
                looked_up = (roots[0],) if roots[0] in written else sources.get(roots[0], ())
            names = {name for i in (*step.reads, *step.writes) for name in given.arrays[i].dims if name}
            yield Kernel(
                name=step.name,
                reads=tuple(reads),
                writes=results,
                flops=step.flops,
                dims=frozenset((names | set(step.summed)) - set(step.grouped)),
                body=step.body,
                trips=step.trips,
                unrolled=step.unrolled,
                over=step.over,
                operands=tuple(roots[-len(step.body.inputs) :] if step.body is not None else operands),
                call=step.call,
                looked_up=tuple(looked_up),
            )


def _find_written(given: Unfused, inputs: Sequence[int], outputs: Sequence[int]) -> set[int]:
    """Return the numbers of the arrays that are in memory; the others are parts of a fused chain."""
    written = {*inputs, *(given.root(i) for i in outputs)}
    working = [step for step in given.steps if not all(i in given.same for i in step.writes)]
    uses = Counter(given.root(i) for step in working for i in step.reads)
    for each in given.resharded:
        if each.source is not None:
            written.update((each.array, given.root(each.source)))
    for step in working:
        if step.body is not None or step.name in MATERIAL:
            first = 1 if given.for_gpus and step.name == LOOKUP else 0
            written.update(given.root(i) for i in step.reads[first:])
            written.update(step.writes)
        elif step.name in REDUCTIONS:
            written.update(step.writes)
        elif step.name in EXPENSIVE and not given.for_gpus:
            written.update(i for i in step.writes if uses[i] > 1)
    return written - given.constants


APART = MATERIAL | {LOOKUP, "sharding_constraint"}
"""Kernels that are fused with no other."""


def share_passes(kernels: Sequence[Kernel], sizes: Sequence[Any]) -> list[Kernel]:
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
