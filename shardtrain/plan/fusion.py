"""Fuse traced operations into kernels, as compilers do. No jax.

Elementwise operations are fused into chains: only arrays that a matrix product, a loop or the result needs
are written to memory. Next: `jaxpr_walk.py`, which finds the operations.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from shardtrain.jaxpr.dims import REDUCTIONS
from shardtrain.plan.program import Array, DeviceCall, Kernel, Program, Resharding

ALIASES = frozenset(
    (
        *("copy", "copy_p", "expand_dims", "name", "optimization_barrier", "reduce_precision", "reshape"),
        *("sharding_constraint", "squeeze", "stop_gradient"),
    )
)
"""Operations that change the name or shape of an array without moving data."""

MATERIAL = frozenset(
    (
        *("cholesky", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"),
        *("custom_call", "dot_general", "ffi_call", "fft", "gather", "ragged_dot_general", "random_bits"),
        *("device_call", "pallas_call", "reduce", "reduce_window", "reduce_window_max", "reduce_window_min"),
        *("reduce_window_sum", "scatter", "scatter-add", "select_and_gather_add", "select_and_scatter_add"),
        *("sort", "threefry2x32", "top_k", "triangular_solve"),
    )
)
"""Operations that are not fused: they read arrays from memory and write their results to it."""

EXPENSIVE = frozenset(
    (
        *("cos", "erf", "erf_inv", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "sin", "tan"),
        "tanh",
    )
)
"""Elementwise operations that XLA for CPU does not compute twice: a result that is used twice is written. XLA
for GPUs computes it twice, as memory is slower."""

LOOKUP = "gather"
"""The lookup of rows in a table. A GPU reads only these rows, or computes only them if elementwise operations
make the table."""


@dataclass(kw_only=True)
class Operation:
    """An operation before fusion; its arrays are numbers.

    Args:
      name: name of its primitive.
      reads, writes: its arrays.
      flops: flops of a matrix product or a convolution.
      summed: names of the dims that it sums over.
      body, trips, unrolled, over: of a loop, as in `Kernel`.
      call: of a call by devices, as in `Kernel`.
      grouped: names of dims of its arrays that its work does not grow with.
      scope, recomputes: as in `Kernel`.
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
    scope: str = ""
    recomputes: bool = False


@dataclass(kw_only=True)
class UnfusedProgram:
    """The operations of a computation.

    Args:
      arrays: all arrays.
      operations: the operations, in order.
      same: number of an array -> number of the array that it is another view of.
      constants: numbers of arrays that are computed from constants only; compilers make them where they are
        read.
      reshardings: changes of sharding of activations.
      for_gpus: whether operations are fused as for GPUs.
    """

    arrays: list[Array] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    same: dict[int, int] = field(default_factory=dict)
    constants: set[int] = field(default_factory=set)
    reshardings: list[Resharding] = field(default_factory=list)
    for_gpus: bool = False

    def find_root(self, number: int) -> int:
        """Return the number of the array in memory that an array is a view of."""
        while number in self.same:
            number = self.same[number]
        return number


def fuse(given: UnfusedProgram, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
    """Fuse operations into a program.

    Args:
      given: the operations.
      inputs, outputs: numbers of its inputs and results.
    """
    return Program(
        arrays=tuple(given.arrays),
        inputs=tuple(inputs),
        outputs=tuple(given.find_root(i) for i in outputs),
        kernels=tuple(_make_kernels(given, _find_written(given, inputs, outputs))),
        reshardings=tuple(
            each if each.source is None else replace(each, source=given.find_root(each.source))
            for each in given.reshardings
        ),
        for_gpus=given.for_gpus,
        sums=_list_sums(given),
    )


def _list_sums(given: UnfusedProgram) -> tuple[tuple[int, ...], ...]:
    terms: dict[int, tuple[int, ...]] = {}
    for each in given.operations:
        if each.name == "add_any":
            roots = map(given.find_root, each.reads)
            terms[each.writes[0]] = tuple(term for i in roots for term in terms.get(i, (i,)))
    return tuple(terms.values())


def _make_kernels(given: UnfusedProgram, written: Set[int]) -> Iterator[Kernel]:
    # number of an array inside a chain -> the arrays in memory that it is computed from
    sources: dict[int, tuple[int, ...]] = {}
    for step in given.operations:
        if all(i in given.same for i in step.writes):
            continue
        roots = [given.find_root(i) for i in step.reads]
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
                scope=step.scope,
                recomputes=step.recomputes,
            )


def _find_written(given: UnfusedProgram, inputs: Sequence[int], outputs: Sequence[int]) -> set[int]:
    """Return the numbers of the arrays in memory; all others stay inside a fused chain."""
    written = {*inputs, *(given.find_root(i) for i in outputs)}
    working = [step for step in given.operations if not all(i in given.same for i in step.writes)]
    uses = Counter(given.find_root(i) for step in working for i in step.reads)
    for each in given.reshardings:
        if each.source is not None:
            written.update((each.array, given.find_root(each.source)))
    for step in working:
        if step.body is not None or step.name in MATERIAL:
            first = 1 if given.for_gpus and step.name == LOOKUP else 0
            written.update(given.find_root(i) for i in step.reads[first:])
            written.update(step.writes)
        elif step.name in REDUCTIONS:
            written.update(step.writes)
        elif step.name in EXPENSIVE and not given.for_gpus:
            written.update(i for i in step.writes if uses[i] > 1)
    return written - given.constants


APART = MATERIAL | {LOOKUP, "sharding_constraint"}
"""Kernels that are never fused with another one."""


def share_passes(kernels: Sequence[Kernel], sizes: Sequence[Any]) -> list[Kernel]:
    """Join each sum, and each chain, with an earlier kernel that reads its largest input; return the kernels.

    A chain is joined only with a sum. A kernel that needs the result of a sum is not joined with it.

    Args:
      kernels: the kernels, in order.
      sizes: bytes of each array on one device, for each of several shardings.
    """
    found: list[Kernel] = []
    sums: set[int] = set()
    # array -> the position in `found` of the kernel that makes it
    made: dict[int, int] = {}
    first = 0
    for kernel in kernels:
        position = _find_host(kernel, found, first, made, sums, sizes)
        if position is None:
            position = len(found)
            found.append(kernel)
        else:
            found[position] = _join(found[position], kernel)
        made.update(dict.fromkeys(kernel.writes, position))
        if kernel.name in REDUCTIONS:
            sums.update(kernel.writes)
        if kernel.body is not None:
            first = len(found)
    return found


def _find_host(
    kernel: Kernel,
    found: Sequence[Kernel],
    first: int,
    made: dict[int, int],
    sums: set[int],
    sizes: Sequence[Any],
) -> int | None:
    """Return the position of the kernel, from `first` on, to join this one with; None if there is none."""
    if not _can_join(kernel) or not kernel.reads:
        return None
    largest = max(kernel.reads, key=lambda i: float(sizes[i].max()))
    # a joined kernel can read the elements of a chain in the same pass, but not the result of a sum
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


def _join(host: Kernel, kernel: Kernel) -> Kernel:
    reads = dict.fromkeys((*host.reads, *(i for i in kernel.reads if i not in host.writes)))
    return replace(
        host, reads=tuple(reads), writes=(*host.writes, *kernel.writes), dims=host.dims | kernel.dims
    )
