"""Operators of a traced step and the values between them, for a search over their shardings. No jax.

A loop over blocks is one pass, each of whose operators stands for all trips. Each parameter has an operator,
which keeps it, adds up its gradient and updates it. Next: `operator_shardings.py`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardtrain import axes
from shardtrain.plan.program import Array, CallSizes, Kernel, Program

SAME_DIM = {axes.RESIDUAL_SEQ: axes.SEQ, axes.KV_HEADS: axes.HEADS}
"""Names that a dim has at some places -> the name that it has here."""

WHOLE = frozenset((axes.LAYERS, axes.HEIGHT, axes.WIDTH))
"""Dims that are not sharded here: a loop goes through blocks, and a convolution needs neighbours."""


@dataclass(frozen=True)
class Part:
    """A kernel, or an array, as a device may have a part of it.

    Args:
      amount: flops of a kernel, or bytes of an array.
      dims: the dims that it can be split over.
    """

    amount: float
    dims: frozenset[str]


Work = tuple[Part, tuple[Part, ...], float]
"""Flops of a kernel, the arrays that it reads and writes, and how often it runs."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What is sharded in one way.

    Args:
      name: what a reader sees.
      kind: a kind of `task_graph.KINDS`; "update" for a parameter.
      sizes: dim -> size, of the dims that it may be sharded over.
      work: of each of its kernels.
      names: of its dims, as the rules of a layout have them.
      kept_bytes: memory of a parameter, its gradient and optimizer state.
    """

    name: str
    kind: str
    names: frozenset[str]
    sizes: Mapping[str, int]
    work: tuple[Work, ...]
    kept_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Use:
    """A value as an operator reads it.

    Args:
      operator: its number.
      messages: how many a collective of it sends in a step; a part of one where arrays are sent together.
      num_bytes: in a step.
    """

    operator: int
    messages: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Value:
    """An array between operators.

    Args:
      dims: those it can be split over.
      source: the operator that makes it.
      uses: who reads it.
      is_parameter: whether it is there from the step before.
    """

    dims: frozenset[str]
    source: int
    uses: tuple[Use, ...]
    is_parameter: bool = False


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The operators of a step in the order of the program, those of parameters last.

    Args:
      operators: all.
      values: what they hand to each other.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]


def find_dims(names: Iterable[str | None]) -> list[str]:
    """Return the dims of these names that something can be split over.

    >>> dims_of(("layers", "batch", "residual_seq", None))
    ['batch', 'seq']
    """
    found = (SAME_DIM.get(name, name) for name in names if name is not None)
    return [name for name in found if name not in WHOLE]


IN_ORDER = frozenset(
    (
        *("cholesky", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "fft", "sort", "top_k"),
        *("triangular_solve", "while"),
    )
)
"""Kernels that need all of a dim at once: examples alone are split."""

REARRANGING = frozenset(("copy", "reduce_sum", "transpose"))
"""Kernels that, where no element is added to another, move elements alone."""


def trace_operators(program: Program, num_parameters: int, state_ratio: float) -> Operators:
    """Return the operators of the program of a loss and its gradient.

    Args:
      program: the traced program; its first inputs are the parameters, its last results their gradients, its
        first result the loss.
      num_parameters: number of parameter arrays.
      state_ratio: bytes that the optimizer keeps for each byte of parameters.
    """
    walk = _Walk(program=program, num_parameters=num_parameters)
    walk.kernels(program, (), 1)
    walk.parameters(state_ratio)
    return Operators(operators=tuple(walk.operators), values=tuple(walk.values()))


_Name = tuple[tuple[int, ...], int]
"""The loop around an array, (): none, and its number there."""


@dataclass(kw_only=True)
class _Walk:
    """The operators found so far.

    Args:
      program: of the step.
      num_parameters: number of parameter arrays.
      operators: those found.
      same: array -> the array that it is, seen from elsewhere.
      source: array -> the operator that makes it, and the dims that it can be split over.
      uses: array -> who reads it.
      carried: what a trip of a loop hands to the next: (before the loop, as the body reads it, as the body
        makes it, trips).
      is_backward: whether the loss has been computed.
    """

    program: Program
    num_parameters: int
    operators: list[Operator] = field(default_factory=list)
    same: dict[_Name, _Name] = field(default_factory=dict)
    source: dict[_Name, tuple[int, frozenset[str]]] = field(default_factory=dict)
    uses: defaultdict[_Name, list[Use]] = field(default_factory=lambda: defaultdict(list))
    carried: list[tuple[_Name, _Name, _Name, int]] = field(default_factory=list)
    is_backward: bool = False

    def kernels(self, program: Program, scope: tuple[int, ...], trips: float) -> None:
        """Add the operators of a program, or of the body of a loop that runs so many times."""
        moved = {each.array for each in program.reshardings if each.source is not None}
        for number, kernel in enumerate(program.kernels):
            if kernel.body is not None and not scope and len(kernel.writes) == len(kernel.body.outputs):
                self._loop(number, kernel, kernel.body)
            elif kernel.body is None and moved.intersection(kernel.writes):
                # a change of sharding is no operator: what is sent follows from the operators around it
                self.same[scope, kernel.writes[0]] = (scope, kernel.reads[0])
            elif self._rearranges(program, kernel, scope):
                self._add_work(program, kernel, scope, trips)
            else:
                self._operator(program, kernel, scope, trips)
            self.is_backward = self.is_backward or (not scope and program.outputs[0] in kernel.writes)

    def _operator(self, program: Program, kernel: Kernel, scope: tuple[int, ...], trips: float) -> None:
        arrays = program.arrays
        dims = dict.fromkeys(name for i in kernel.writes for name in arrays[i].dims if name)
        for i in kernel.reads:
            use = Use(operator=len(self.operators), messages=trips, num_bytes=trips * arrays[i].num_bytes)
            self.uses[scope, i].append(use)
        for i in kernel.writes:
            self.source[scope, i] = (len(self.operators), frozenset(find_dims(arrays[i].dims)))
        self.operators.append(
            Operator(
                name=f"{'block: ' if scope else ''}{kernel.name} ({', '.join(dims)})",
                kind="backward" if self.is_backward else "forward",
                names=kernel.dims,
                sizes=_sizes(program, kernel),
                work=tuple(_work(program, kernel, trips)),
            )
        )

    def _rearranges(self, program: Program, kernel: Kernel, scope: tuple[int, ...]) -> bool:
        """Return whether a kernel only moves the elements of one array, so that partial sums stay such."""
        arrays = program.arrays
        if kernel.name not in REARRANGING or (len(kernel.reads), len(kernel.writes)) != (1, 1):
            return False
        known = self._root((scope, kernel.reads[0])) in self.source
        return known and arrays[kernel.reads[0]].num_bytes == arrays[kernel.writes[0]].num_bytes

    def _add_work(self, program: Program, kernel: Kernel, scope: tuple[int, ...], trips: float) -> None:
        """Have an operator rearrange what it makes."""
        made = self._root((scope, kernel.reads[0]))
        number = self.source[made][0]
        before = self.operators[number]
        self.operators[number] = replace(before, work=(*before.work, *_work(program, kernel, trips)))
        self.same[scope, kernel.writes[0]] = made

    def _loop(self, number: int, kernel: Kernel, body: Program) -> None:
        """Add the operators of a loop's body; its inputs and results are arrays outside."""
        arrays, scope = self.program.arrays, (number,)

        def number_of_whole(outside: Sequence[int], inside: Sequence[int]) -> int:
            pairs = zip(outside, inside, strict=True)
            return sum(arrays[i].num_bytes == body.arrays[j].num_bytes for i, j in pairs)

        # the first results of a loop are what it carries; inputs are constants, carried, then stacked ones
        num_carried = number_of_whole(kernel.writes, body.outputs)
        first = number_of_whole(kernel.operands, body.inputs) - num_carried
        for position, (outer, inner) in enumerate(zip(kernel.operands, body.inputs, strict=True)):
            if first <= position < first + num_carried:
                made = (scope, body.outputs[position - first])
                self.carried.append((((), outer), (scope, inner), made, kernel.trips))
            else:
                self.same[scope, inner] = ((), outer)
        for outer, inner in zip(kernel.writes, body.outputs, strict=True):
            self.same[(), outer] = (scope, inner)
        self.kernels(body, scope, kernel.trips)

    def parameters(self, state_ratio: float) -> None:
        """Add the operators that keep and update parameters."""
        arrays, program = self.program.arrays, self.program
        num_parameters = self.num_parameters
        gradients = program.outputs[len(program.outputs) - num_parameters :]
        for i, gradient in zip(program.inputs[:num_parameters], gradients, strict=True):
            array, number = arrays[i], len(self.operators)
            dims = frozenset(find_dims(array.dims))
            # gradients of all parameters and blocks are added up together
            use = Use(operator=number, messages=1 / num_parameters, num_bytes=arrays[gradient].num_bytes)
            self.uses[(), gradient].append(use)
            self.source[(), i] = (number, dims)
            # as in a prediction: parameter and gradient are read, the parameter written, the state both
            moved = Part((3 + 2 * state_ratio) * array.num_bytes, dims)
            self.operators.append(
                Operator(
                    name=f"parameter ({', '.join(name for name in array.dims if name)})",
                    kind="update",
                    names=frozenset(name for name in array.dims if name),
                    sizes=_array_sizes([array]),
                    work=((Part(0.0, dims), (moved,), 1),),
                    kept_bytes=(2 + state_ratio) * array.num_bytes,
                )
            )

    def values(self) -> Iterator[Value]:
        """Yield what operators hand to each other."""
        uses: defaultdict[_Name, list[Use]] = defaultdict(list)
        for name, found in self.uses.items():
            uses[self._root(name)] += found
        for before, inside, made, trips in self.carried:
            # the first trip reads what was there before the loop, the others what a trip made
            for use in uses[self._root(inside)]:
                uses[self._root(before)].append(_repeat_trips(use, 1, trips))
                if trips > 1:
                    uses[self._root(made)].append(_repeat_trips(use, trips - 1, trips))
        for name, (number, dims) in self.source.items():
            if uses[name]:
                is_parameter = self.operators[number].kind == "update"
                # parameters that an operator needs are gathered together with others
                found = [
                    replace(use, messages=use.messages / self.num_parameters) if is_parameter else use
                    for use in uses[name]
                ]
                yield Value(dims=dims, source=number, uses=tuple(found), is_parameter=is_parameter)

    def _root(self, name: _Name) -> _Name:
        while name in self.same:
            name = self.same[name]
        return name


def _repeat_trips(use: Use, trips: float, all_trips: float) -> Use:
    """Return a use in some of the trips of a loop."""
    part = trips / all_trips
    return replace(use, messages=part * use.messages, num_bytes=part * use.num_bytes)


def _work(program: Program, kernel: Kernel, times: float) -> Iterator[Work]:
    """Yield the work of a kernel; of a loop inside a loop that of its body."""
    if kernel.body is not None:
        for each in kernel.body.kernels:
            yield from _work(kernel.body, each, times * kernel.trips)
        return
    moved = tuple(
        Part(program.arrays[i].num_bytes, frozenset(find_dims(program.arrays[i].dims)))
        for i in (*kernel.reads, *kernel.writes)
    )
    yield Part(_flops(program, kernel), frozenset(find_dims(kernel.dims))), moved, times


def _flops(program: Program, kernel: Kernel) -> float:
    """Return the flops that a kernel takes the time of; of a call those of one device that has all arrays."""
    if kernel.call is None:
        return kernel.flops
    reads, writes = (
        [np.array([program.arrays[i].num_bytes]) for i in each] for each in (kernel.operands, kernel.writes)
    )
    found = kernel.call.cost(CallSizes(reads, writes, lambda axis: 1, True))
    return float(np.sum(found.flops if found.timed_flops is None else found.timed_flops))


def _sizes(program: Program, kernel: Kernel) -> dict[str, int]:
    """Return the dims that a kernel can be sharded over."""
    found = _array_sizes([program.arrays[i] for i in (*kernel.reads, *kernel.writes)])
    if kernel.name in IN_ORDER:
        return {name: size for name, size in found.items() if name == axes.BATCH}
    return {name: size for name, size in found.items() if name != kernel.over}


def _array_sizes(arrays: Sequence[Array]) -> dict[str, int]:
    """Return dim -> a number that each split of it divides, without dims that an array has twice."""
    found: dict[str, int] = {}
    twice: set[str] = set()
    for array in arrays:
        names = [
            (SAME_DIM.get(name, name), size)
            for name, size in zip(array.dims, array.shape, strict=True)
            if name is not None and name not in WHOLE
        ]
        twice |= {name for name, number in Counter(name for name, _ in names).items() if number > 1}
        for name, size in names:
            found[name] = math.gcd(found.get(name, 0), size)
    return {name: size for name, size in found.items() if name not in twice and size > 1}
