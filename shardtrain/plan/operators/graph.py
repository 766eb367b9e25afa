"""List the operators of a traced step and the values between them, for a search over shardings. No jax.

Each operator in a loop over blocks stands for all trips. Each parameter has an operator, which stores it,
adds up its gradient and updates it. Next: `shardings.py`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from shardtrain import axes
from shardtrain.plan.program import ARRIVED_TOKENS, Array, CallSizes, Kernel, Program

SAME_DIM = {axes.RESIDUAL_SEQ: axes.SEQ, axes.KV_HEADS: axes.HEADS, ARRIVED_TOKENS: axes.BATCH}
"""Another name of a dim -> its name here."""


def same_dim(name: str) -> str:
    """Return the name here of a dim; numbered channels are of the arrays between two convolutions.

    >>> same_dim("kv_heads"), same_dim("channels_in:3")
    ('heads', 'channels:3')
    """
    _, numbered, number = name.partition(":")
    return f"channels:{number}" if numbered else SAME_DIM.get(name, name)


WHOLE = frozenset((axes.LAYERS, axes.HEIGHT, axes.WIDTH))
"""Dims that are never sharded here, as a loop runs over blocks and a convolution needs neighbours."""


@dataclass(frozen=True)
class Part:
    """A kernel or an array that may be split over devices.

    Args:
      amount: flops of the kernel, or bytes of the array.
      dims: the dims that it can be split over.
    """

    amount: float
    dims: frozenset[str]


Work = tuple[Part, tuple[Part, ...], float]
"""Flops of a kernel, the arrays that it reads and writes, and its number of runs."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A part of the step that has one sharding.

    Args:
      name: its name in reports.
      kind: "forward", "backward", or "update" for a parameter.
      sizes: dim -> size of the dims that it may be sharded over.
      work: work of each of its kernels.
      names: its dim names in the rules of a layout.
      kept_bytes: memory of a parameter, its gradient and optimizer state.
      scope: the model's operator of which it is a part, or path of the parameter; "" if that is not known.
      choices: dims that a run can split; () unless it is the model's operator that its scope is named after.
      result: dim names of its result.
    """

    name: str
    kind: str
    names: frozenset[str]
    sizes: Mapping[str, int]
    work: tuple[Work, ...]
    kept_bytes: float = 0.0
    scope: str = ""
    choices: tuple[str, ...] = ()
    result: tuple[str | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Use:
    """A use of a value by an operator.

    Args:
      operator: number of the operator.
      messages: messages of its collective in a step; a fraction if arrays are sent together.
      num_bytes: bytes in a step.
      recomputes: whether it is in a part of the backward that is computed again, for which nothing that was
        sent before is kept.
    """

    operator: int
    messages: float
    num_bytes: float
    recomputes: bool = False


@dataclass(frozen=True, kw_only=True)
class Value:
    """An array between operators.

    Args:
      dims: the dims that it can be split over.
      source: number of the operator that makes it.
      uses: its uses.
      added: numbers of operators whose partial sums are added to it before they are sent, if alike.
    """

    dims: frozenset[str]
    source: int
    uses: tuple[Use, ...]
    added: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The operators of a step.

    Args:
      operators: the operators in the order of the program; the ones of parameters are last.
      values: the values between them.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]

    @cached_property
    def groups(self) -> Mapping[int, tuple[int, ...]]:
        """Product, convolution or lookup -> the operators that follow it: its scope, and its parameter.

        Operators without a scope that read this parameter, or make its gradient, follow it.
        Without any scope, each operator is a group.
        """
        if not any(each.scope for each in self.operators):
            return {number: (number,) for number in range(len(self.operators))}
        leads: dict[str, int] = {}
        for number, each in enumerate(self.operators):
            if each.choices:
                leads.setdefault(each.scope, number)
        # a parameter with several readers follows the last
        readers = {scope.split(":")[0]: scope for scope in leads}
        found: dict[int, list[int]] = {lead: [] for lead in leads.values()}
        for number, each in enumerate(self.operators):
            lead = leads.get(readers.get(each.scope, each.scope))
            if lead is not None:
                found[lead].append(number)
        free = {number for number, each in enumerate(self.operators) if not each.scope}
        near: defaultdict[int, set[int]] = defaultdict(set)
        for value in self.values:
            for use in value.uses:
                near[value.source].add(use.operator)
                near[use.operator].add(value.source)
        for numbers in found.values():
            stored = [number for number in numbers if self.operators[number].kind == "update"]
            numbers += sorted(free.intersection(*(near[number] for number in stored))) if stored else []
        return {lead: tuple(numbers) for lead, numbers in found.items()}


def find_dims(names: Iterable[str | None]) -> list[str]:
    """Return the dims with these names that can be sharded.

    >>> find_dims(("layers", "batch", "residual_seq", None))
    ['batch', 'seq']
    """
    found = (same_dim(name) for name in names if name is not None)
    return [name for name in found if name not in WHOLE]


def _rename(names: Iterable[str | None]) -> tuple[str | None, ...]:
    """Return the dims with these names, also those that are never sharded."""
    return tuple(name and same_dim(name) for name in names)


CONVOLUTION = "conv_general_dilated"
"""Primitive of convolutions."""

IN_ORDER = frozenset(
    (
        *("cholesky", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "fft", "sort", "top_k"),
        *("triangular_solve", "while"),
    )
)
"""Kernels that need all of a dim at once; only examples are split."""

REARRANGING = frozenset(("copy", "reduce_sum", "split", "transpose", "unstack"))
"""Kernels that only move elements, unless they add them up."""


def trace_operators(program: Program, parameters: Sequence[str], state_ratio: float) -> Operators:
    """Return the operators of the program of a loss and its gradient.

    Args:
      program: the traced program; its first inputs are the parameters, its last results their gradients, and
        its first result is the loss.
      parameters: paths of the parameters.
      state_ratio: bytes of optimizer state for each byte of parameters.
    """
    walk = _Walk(program=program, parameters=parameters)
    walk.add_kernels(program, (), 1)
    walk.add_parameters(state_ratio)
    return Operators(operators=tuple(walk.operators), values=tuple(walk.list_values()))


_Name = tuple[tuple[int, ...], int]
"""The loop around an array, () for none, and its number in it."""


@dataclass(kw_only=True)
class _Walk:
    """The operators that a walk has found so far.

    Args:
      program: the program of the step.
      parameters: paths of the parameters.
      operators: the operators.
      same: array -> the same array in another scope or before a change of sharding.
      source: array -> number of the operator that makes it, and the dims that it can be split over.
      uses: array -> its uses.
      carried: the carried arrays of loops: (before the loop, as the body reads it, as the body makes it,
        trips).
      added: pairs of arrays that are added to be the gradient of a parameter.
      terms: arrays that are added by operators that read them all.
      is_backward: whether the loss has been computed.
    """

    program: Program
    parameters: Sequence[str]
    operators: list[Operator] = field(default_factory=list)
    same: dict[_Name, _Name] = field(default_factory=dict)
    source: dict[_Name, tuple[int, frozenset[str]]] = field(default_factory=dict)
    uses: defaultdict[_Name, list[Use]] = field(default_factory=lambda: defaultdict(list))
    carried: list[tuple[_Name, _Name, _Name, int]] = field(default_factory=list)
    added: list[tuple[_Name, _Name]] = field(default_factory=list)
    terms: list[list[_Name]] = field(default_factory=list)
    is_backward: bool = False

    def add_kernels(self, program: Program, scope: tuple[int, ...], trips: float) -> None:
        """Add the operators of a program, or of the body of a loop."""
        moved = {each.array for each in program.reshardings if each.source is not None}
        for number, kernel in enumerate(program.kernels):
            if kernel.body is not None and not scope and len(kernel.writes) == len(kernel.body.outputs):
                self._add_loop(number, kernel, kernel.body)
            elif kernel.body is None and moved.intersection(kernel.writes):
                # a resharding is no operator, as its collectives follow from the operators around it
                self.same[scope, kernel.writes[0]] = (scope, kernel.reads[0])
            elif kernel.name == "add_any" and axes.BATCH not in kernel.dims and len(kernel.reads) > 1:
                # the parts of a parameter's gradient: partial sums are added before they are sent
                first, *others = ((scope, i) for i in kernel.reads)
                self.same[scope, kernel.writes[0]] = first
                self.added += [(first, other) for other in others]
            elif self._rearranges(program, kernel, scope):
                self._add_work(program, kernel, scope, trips)
            else:
                self._add_operator(program, kernel, scope, trips)
            self.is_backward = self.is_backward or (not scope and program.outputs[0] in kernel.writes)
        self.terms += [[(scope, i) for i in terms] for terms in program.sums]

    def _add_operator(self, program: Program, kernel: Kernel, scope: tuple[int, ...], trips: float) -> None:
        arrays = program.arrays
        dims = dict.fromkeys(name for i in kernel.writes for name in arrays[i].dims if name)
        for i in kernel.reads:
            use = Use(
                operator=len(self.operators),
                messages=trips,
                num_bytes=trips * arrays[i].num_bytes,
                recomputes=kernel.recomputes and self.is_backward,
            )
            self.uses[scope, i].append(use)
        for i in kernel.writes:
            self.source[scope, i] = (len(self.operators), frozenset(find_dims(arrays[i].dims)))
        self.operators.append(
            Operator(
                name=f"{'block: ' if scope else ''}{kernel.name} ({', '.join(dims)})",
                kind="backward" if self.is_backward else "forward",
                names=kernel.dims,
                sizes=_find_sizes(program, kernel),
                work=tuple(_list_work(program, kernel, trips)),
                scope=kernel.scope or self._find_scope(program, kernel, scope),
                choices=tuple(_list_choices(program, kernel)),
                result=_rename(arrays[kernel.writes[0]].dims) if kernel.writes else (),
            )
        )

    def _find_scope(self, program: Program, kernel: Kernel, scope: tuple[int, ...]) -> str:
        """Return the scope of what a kernel reads: functions with derivatives of their own have none."""
        made = {name for i in kernel.writes for name in program.arrays[i].dims}
        reads = (i for i in kernel.reads if made <= set(program.arrays[i].dims))
        roots = (self._root((scope, i)) for i in reads)
        scopes = (self.operators[self.source[root][0]].scope for root in roots if root in self.source)
        return next(filter(None, scopes), "")

    def _rearranges(self, program: Program, kernel: Kernel, scope: tuple[int, ...]) -> bool:
        """Return whether a kernel only moves the elements of one array, so that sums may stay partial."""
        arrays = program.arrays
        if kernel.name not in REARRANGING or len(kernel.reads) != 1:
            return False
        known = self._root((scope, kernel.reads[0])) in self.source
        return known and arrays[kernel.reads[0]].num_bytes == sum(arrays[i].num_bytes for i in kernel.writes)

    def _add_work(self, program: Program, kernel: Kernel, scope: tuple[int, ...], trips: float) -> None:
        """Add a kernel to the operator whose result it rearranges."""
        made = self._root((scope, kernel.reads[0]))
        number = self.source[made][0]
        before = self.operators[number]
        self.operators[number] = replace(before, work=(*before.work, *_list_work(program, kernel, trips)))
        for i in kernel.writes:
            if len(kernel.writes) == 1:
                self.same[scope, i] = made
            else:
                self.source[scope, i] = (number, frozenset(find_dims(program.arrays[i].dims)))

    def _add_loop(self, number: int, kernel: Kernel, body: Program) -> None:
        """Add the operators of a loop's body."""
        arrays, scope = self.program.arrays, (number,)

        def number_of_whole(outside: Sequence[int], inside: Sequence[int]) -> int:
            pairs = zip(outside, inside, strict=True)
            return sum(arrays[i].num_bytes == body.arrays[j].num_bytes for i, j in pairs)

        # results are carried, then stacked; inputs are constants, then carried, then stacked
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
        self.add_kernels(body, scope, kernel.trips)

    def add_parameters(self, state_ratio: float) -> None:
        """Add the operators that store and update parameters."""
        arrays, program = self.program.arrays, self.program
        num_parameters = len(self.parameters)
        gradients = program.outputs[len(program.outputs) - num_parameters :]
        for path, i, gradient in zip(self.parameters, program.inputs, gradients, strict=False):
            array, number = arrays[i], len(self.operators)
            dims = frozenset(find_dims(array.dims))
            # gradients of all parameters and blocks are added up together
            use = Use(operator=number, messages=1 / num_parameters, num_bytes=arrays[gradient].num_bytes)
            self.uses[(), gradient].append(use)
            self.source[(), i] = (number, dims)
            # as in a prediction: two arrays are read and one is written, and the state is read and written
            moved = Part((3 + 2 * state_ratio) * array.num_bytes, dims)
            self.operators.append(
                Operator(
                    name=f"parameter ({', '.join(name for name in array.dims if name)})",
                    kind="update",
                    names=frozenset(name for name in array.dims if name),
                    sizes=_find_array_sizes([array]),
                    work=((Part(0.0, dims), (moved,), 1),),
                    kept_bytes=(2 + state_ratio) * array.num_bytes,
                    scope=path,
                    result=_rename(array.dims),
                )
            )

    def list_values(self) -> Iterator[Value]:
        """Yield the values between operators."""
        uses: defaultdict[_Name, list[Use]] = defaultdict(list)
        for name, found in self.uses.items():
            uses[self._root(name)] += found
        for before, inside, made, trips in self.carried:
            # the first trip reads the array before the loop, the others the result of a trip
            for use in uses[self._root(inside)]:
                uses[self._root(before)].append(_repeat_trips(use, 1, trips))
                if trips > 1:
                    uses[self._root(made)].append(_repeat_trips(use, trips - 1, trips))
        added = {self._root(other): self._root(one) for one, other in self.added}
        for other, one in added.items():
            uses[other] += uses[one]
        earlier: defaultdict[_Name, list[int]] = defaultdict(list)
        for other, one in added.items():
            earlier[other].append(self.source[one][0])
        for terms in self.terms:
            roots = [root for root in map(self._root, terms) if root in self.source]
            for number, root in enumerate(roots):
                readers = {use.operator for use in uses[root]}
                alike = (one for one in roots[:number] if {use.operator for use in uses[one]} == readers)
                earlier[root] += [self.source[one][0] for one in alike]
        for name, (number, dims) in self.source.items():
            if uses[name]:
                is_parameter = self.operators[number].kind == "update"
                # parameters are gathered together with others
                found = [
                    replace(use, messages=use.messages / len(self.parameters)) if is_parameter else use
                    for use in uses[name]
                ]
                yield Value(
                    dims=dims,
                    source=number,
                    uses=tuple(found),
                    added=tuple(dict.fromkeys(earlier[name])),
                )

    def _root(self, name: _Name) -> _Name:
        while name in self.same:
            name = self.same[name]
        return name


def _repeat_trips(use: Use, trips: float, all_trips: float) -> Use:
    """Return a use in some of the trips of a loop."""
    part = trips / all_trips
    return replace(use, messages=part * use.messages, num_bytes=part * use.num_bytes)


def _list_work(program: Program, kernel: Kernel, times: float) -> Iterator[Work]:
    """Yield the work of a kernel, or of the body of a loop."""
    if kernel.body is not None:
        for each in kernel.body.kernels:
            yield from _list_work(kernel.body, each, times * kernel.trips)
        return
    moved = tuple(
        Part(program.arrays[i].num_bytes, frozenset(find_dims(program.arrays[i].dims)))
        for i in (*kernel.reads, *kernel.writes)
    )
    yield Part(_count_flops(program, kernel), frozenset(find_dims(kernel.dims))), moved, times


def _count_flops(program: Program, kernel: Kernel) -> float:
    """Return the flops that a kernel takes the time of; for a call, of one device that has all arrays."""
    if kernel.call is None:
        return kernel.flops
    reads, writes = (
        [np.array([program.arrays[i].num_bytes]) for i in each] for each in (kernel.operands, kernel.writes)
    )
    found = kernel.call.cost(CallSizes(reads, writes, lambda axis: 1, True))
    return float(np.sum(found.flops if found.timed_flops is None else found.timed_flops))


def _find_sizes(program: Program, kernel: Kernel) -> dict[str, int]:
    """Return the dims that a kernel can be sharded over."""
    found = _find_array_sizes([program.arrays[i] for i in (*kernel.reads, *kernel.writes)])
    if kernel.name in IN_ORDER:
        return {name: size for name, size in found.items() if name == axes.BATCH}
    return {name: size for name, size in found.items() if name != kernel.over}


def _list_choices(program: Program, kernel: Kernel) -> list[str]:
    """Return the dims that a run can split of a kernel, if its scope is named after it."""
    if kernel.name not in kernel.scope.split(":"):
        return []
    arrays = [program.arrays[i] for i in (*kernel.reads, *kernel.writes)]
    names = {name for i in kernel.writes for name in find_dims(program.arrays[i].dims)}
    if kernel.name == CONVOLUTION:
        pairs = {pair for each in arrays for pair in zip(_rename(each.dims), each.shape, strict=True)}
        sizes = Counter(name for name, _ in pairs if name == axes.BATCH or (name and ":" in name))
        if any(number > 1 for number in sizes.values()):
            # groups of channels: devices compute their parts by code of their own
            return []
        names = set(sizes)
    return [dim for dim in _find_sizes(program, kernel) if kernel.name == "dot_general" or dim in names]


def _find_array_sizes(arrays: Sequence[Array]) -> dict[str, int]:
    """Return dim -> the number that its splits must divide, without dims that an array has twice."""
    found: dict[str, int] = {}
    twice: set[str] = set()
    for array in arrays:
        names = [
            (same_dim(name), size)
            for name, size in zip(array.dims, array.shape, strict=True)
            if name is not None and name not in WHOLE
        ]
        twice |= {name for name, number in Counter(name for name, _ in names).items() if number > 1}
        for name, size in names:
            found[name] = math.gcd(found.get(name, 0), size)
    return {name: size for name, size in found.items() if name not in twice and size > 1}
