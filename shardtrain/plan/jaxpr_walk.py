"""Walk the operations of a traced computation: arrays with named dims, kernels, sums to complete.

Next: `trace.py`, which traces the loss of a model; `named_dims.py`, `fusion.py`.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from shardtrain import axes
from shardtrain.functional.jaxprs import scan_counts
from shardtrain.plan.device_calls import NAME
from shardtrain.plan.fusion import ALIASES, MATERIAL, Step, Unfused, fuse, root
from shardtrain.plan.named_dims import CUMULATIVE, Operands, apply_delta, find_names
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, Array, Dims, Program, Resharded

LINEAR = ("add", "add_any", "neg", "convert_element_type", "transpose")
"""Operations by which the parts of a sum may stay apart: those of sums are added once, not one by one."""

LOOKUPS = {"gather": 0, "scatter-add": 2}
"""Operation -> which of its operands has the rows that it looks up or adds."""


class Partial(NamedTuple):
    """A sum that is not complete.

    Args:
      summed: names of the dims over which devices have parts of it.
      dims: the names of its own dims when it was made.
      rows: of a lookup the number of its table, of the sum of rows into a table that of the rows.
    """

    summed: tuple[str, ...]
    dims: Dims
    rows: int | None = None


def num_terms(number: int, makers: Mapping[int, Step], constants: Set[int]) -> int:
    """Return the number of arrays of which one is the sum, as jax adds up gradients.

    Args:
      number: of the array.
      makers: number of an array -> the operation that writes it.
      constants: numbers of arrays that are computed from constants alone.
    """
    step = makers.get(number)
    if number in constants:
        return 0
    if step is not None and step.name == "add_any":
        return sum(num_terms(each, makers, constants) for each in step.reads)
    if step is not None and step.name in (*ALIASES, "convert_element_type", "transpose"):
        return num_terms(step.reads[0], makers, constants)
    return 1


CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters that hold the computation that an operation stands for."""

OF_EXAMPLES = (axes.BATCH, ARRIVED)
"""Dims of examples: sums over them are gradients of parameters, whose collectives are those of theory."""

OPAQUE = ("pallas_call", "reduce", "reduce_window", "custom_linear_solve")
"""Operations that hold a computation of single elements or of a kernel instead."""


@dataclass(kw_only=True)
class Walk:
    """The operations of a computation, found one after the other.

    Args:
      arrays: those found so far.
      steps: the operations found so far.
      same: number of an array -> that of the array in memory of which it is another view.
      partial: number of an array -> what is not complete of its sum.
      constrained: numbers of the arrays whose names are those of a constraint.
      constants: numbers of the arrays that are computed from constants alone.
      moves: number of an array -> the change of sharding that made it.
      resharded: sums that were completed.
      of: variable of jax -> number of its array.
      for_gpus: whether they are fused as for GPUs.
    """

    arrays: list[Array] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    same: dict[int, int] = field(default_factory=dict)
    partial: dict[int, Partial] = field(default_factory=dict)
    constrained: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    moves: dict[int, Resharded] = field(default_factory=dict)
    resharded: list[Resharded] = field(default_factory=list)
    of: dict[Any, int] = field(default_factory=dict)
    for_gpus: bool = False

    def add(self, aval: Any, dims: Dims | None = None) -> int:
        """Add an array; return its number."""
        shape = tuple(getattr(aval, "shape", ()))
        item_bytes = getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.arrays.append(Array(shape=shape, item_bytes=item_bytes, dims=dims or (None,) * len(shape)))
        return len(self.arrays) - 1

    def bind(self, variables: Sequence[Any], numbers: Sequence[int]) -> None:
        self.of.update(zip(variables, numbers, strict=True))

    def name(self, number: int, dims: Dims) -> None:
        """Give an array the names that it does not have yet."""
        array = self.arrays[number]
        self.arrays[number] = replace(array, dims=apply_delta(array.dims, dims))

    def result(self, number: int, dims: Dims | None, of_parameter: bool) -> None:
        """Name a result, and the array in memory that it is a view of if that has the same shape."""
        for i in (number, self.root(number)):
            if dims is not None and len(dims) == len(self.arrays[i].shape):
                self.name(i, dims)
            self.arrays[i] = replace(self.arrays[i], of_parameter=of_parameter)

    def number(self, atom: Any) -> int:
        if hasattr(atom, "val"):
            number = self.add(atom.aval)
            self.constants.add(number)
            return number
        return self.of[atom]

    def run(self, jaxpr: Any) -> list[int]:
        """Add the operations of a jaxpr whose inputs are bound; return its outputs."""
        for variable in jaxpr.constvars:
            self.of.setdefault(variable, self.add(variable.aval))
        for equation in jaxpr.eqns:
            reads = [self.number(atom) for atom in equation.invars]
            self.bind(equation.outvars, self._equation(equation, reads))
        return [self.number(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, reads: list[int]) -> list[int]:
        primitive, params = equation.primitive.name, equation.params
        if primitive == "scan":
            return self._scan(equation, reads)
        if primitive == "while":
            return self._while(equation, reads)
        if primitive == NAME:
            return self._close(params, reads)
        if primitive == "cond":
            # the branch with the most operations stands for all
            branch = max(params["branches"], key=lambda each: len(each.jaxpr.eqns))
            return self._inline(branch, reads[1:])
        inner = next((params[key] for key in CALLED if key in params), None)
        if inner is not None and primitive not in OPAQUE:
            return self._inline(inner, reads)
        return self._operation(equation, reads)

    def _close(self, params: Any, reads: list[int]) -> list[int]:
        """Add a call that devices compute by hand, whose results have names of their own."""
        found, results = params["call"], params["results"]
        roots = set(map(self.root, reads))
        call = found.after(
            step.call for step in self.steps if step.call and roots.issuperset(map(self.root, step.reads))
        )
        writes = [self.add(jax.ShapeDtypeStruct(shape, dtype), dims) for shape, dtype, dims in results]
        waiting = self.partial.pop(reads[0], None) if call.linear else None
        self._sums(NAME, reads, writes, ())
        if waiting is not None:
            passed = waiting._replace(dims=self.arrays[writes[0]].dims, rows=None)
            if call.completes:
                self._complete(writes[0], passed)
            else:
                self.partial[writes[0]] = passed
        self.steps.append(Step(name=NAME, reads=reads, writes=writes, call=call))
        return writes

    def _inline(self, inner: Any, reads: list[int]) -> list[int]:
        jaxpr = getattr(inner, "jaxpr", inner)
        self.bind(jaxpr.invars, reads[len(reads) - len(jaxpr.invars) :])
        return self.run(jaxpr)

    def _operation(self, equation: Any, reads: list[int]) -> list[int]:
        primitive = equation.primitive.name
        if primitive in CUMULATIVE:
            reads = [self._gather(reads[0], equation.params["axis"])]
        found = find_names(
            primitive,
            Operands(
                [self.arrays[i].dims for i in reads],
                [self.arrays[i].shape for i in reads],
                equation.params,
                [tuple(out.aval.shape) for out in equation.outvars],
            ),
        )
        writes = [self.add(out.aval, dims) for out, dims in zip(equation.outvars, found.outputs, strict=True)]
        if primitive == "sharding_constraint":
            self._constrain(equation.params["sharding"].spec, reads[0], writes[0])
        elif primitive in ALIASES:
            self.same[writes[0]] = reads[0]
            if reads[0] in self.partial:
                before = self.partial.pop(reads[0])
                self.partial[writes[0]] = before._replace(dims=self.arrays[writes[0]].dims)
        else:
            self._sums(primitive, reads, writes, found.summed)
            if primitive not in MATERIAL and all(self.root(i) in self.constants for i in reads):
                self.constants.update(writes)
        step = Step(name=primitive, reads=reads, writes=writes, flops=found.flops, summed=found.summed)
        self.steps.append(replace(step, grouped=found.grouped))
        return writes

    def _gather(self, number: int, axis: int) -> int:
        """Return an array with one dim whole on each device."""
        before = self.arrays[number]
        if before.dims[axis] is not None:
            dims = (*before.dims[:axis], None, *before.dims[axis + 1 :])
            found = len(self.arrays)
            self.arrays.append(replace(before, dims=dims))
            self.moves[found] = Resharded(array=found, before=before.dims, source=number)
            number = found
        return number

    def _sums(
        self, primitive: str, reads: Sequence[int], writes: Sequence[int], summed: Sequence[str]
    ) -> None:
        """Note which arrays are parts of a sum until all devices have added theirs."""
        # what arrived is of examples and of positions
        summed = tuple(axes.SEQ if name in (ARRIVED, ARRIVED_TOKENS) else name for name in summed)
        summed = tuple(name for name in summed if name not in OF_EXAMPLES)
        waiting = {self.partial[i].summed for i in reads if i in self.partial}
        rows = reads[LOOKUPS[primitive]] if primitive in LOOKUPS else None
        kept = primitive in LINEAR and len(waiting) == 1 and all(i in self.partial for i in reads)
        for i in reads:
            if i in self.partial:
                before = self.partial.pop(i)
                if kept and len(reads) == 1:
                    rows = before.rows
                elif not kept:
                    # an operation on its elements gets it as its own result is sharded
                    alike = writes and self.arrays[writes[0]].shape == self.arrays[i].shape
                    self._complete(writes[0] if alike and i not in self.moves else i, before)
        if kept:
            summed = waiting.pop()
        if summed:
            self.partial.update((i, Partial(summed, self.arrays[i].dims, rows)) for i in writes)

    def _complete(self, number: int, before: Partial) -> None:
        """Note that a sum over sharded dims is complete from here on."""
        move = self.moves.pop(number, None)
        source = None if move is None else move.source
        rows = None if before.rows is None else self.root(before.rows)
        change = Resharded(array=number, before=before.dims, summed=before.summed, source=source, rows=rows)
        self.resharded.append(change)

    def _constrain(self, spec: Sequence[Any], before: int, after: int) -> None:
        """Take the names of a constraint; dims without one are not sharded from here on."""
        shape = self.arrays[after].shape
        dims = tuple(
            (entry[0] if entry else None) if isinstance(entry, tuple) else entry
            for entry in (*spec, *(None,) * (len(shape) - len(spec)))
        )
        first = self.root(before)
        waiting = self.partial.pop(before, None)
        if first not in self.constrained and len(self.arrays[first].shape) == len(dims):
            # the operation that makes an array makes it as its first constraint says
            waiting = waiting and waiting._replace(dims=self.arrays[first].dims)
            self.constrained.add(first)
            for number in (first, before, after):
                self.arrays[number] = replace(self.arrays[number], dims=dims)
            self.same[after] = before
        elif self.arrays[before].dims == dims:
            self.arrays[after] = replace(self.arrays[after], dims=dims)
            self.same[after] = before
        else:
            change = Resharded(array=after, before=self.arrays[before].dims, source=before)
            self.arrays[after] = replace(self.arrays[after], dims=dims)
            self.moves[after] = change
        if waiting is not None:
            self.partial[after] = waiting

    def _scan(self, equation: Any, reads: list[int]) -> list[int]:
        params = equation.params
        jaxpr = params["jaxpr"].jaxpr
        consts, carried = scan_counts(equation)
        given = [self.arrays[i].dims for i in reads]
        given[consts + carried :] = [dims[1:] for dims in given[consts + carried :]]
        # the names of what is carried may be known only from what the body makes of it
        for _ in range(2):
            body = Walk(for_gpus=self.for_gpus)
            numbers = [body.add(v.aval, dims) for v, dims in zip(jaxpr.invars, given, strict=True)]
            body.bind(jaxpr.invars, numbers)
            body.constants.update(
                of_body
                for of_body, i in zip(numbers[:consts], reads[:consts], strict=True)
                if self.root(i) in self.constants
            )
            outputs = body.run(jaxpr)
            for i in range(carried):
                given[consts + i] = apply_delta(given[consts + i], body.arrays[outputs[i]].dims)
        program = body.program(numbers, outputs)
        first = next(
            (self.arrays[i].dims[0] for i in reads[consts + carried :] if self.arrays[i].dims[0]), None
        )
        dims = [program.arrays[i].dims for i in outputs]
        dims[carried:] = [(first, *each) for each in dims[carried:]]
        return self._add_loop(equation, reads, dims, program, params["length"], first)

    def _while(self, equation: Any, reads: list[int]) -> list[int]:
        """A loop whose number of trips nobody knows before it runs: counted once."""
        jaxpr = equation.params["body_jaxpr"].jaxpr
        body = Walk(for_gpus=self.for_gpus)
        given = reads[equation.params["cond_nconsts"] :]
        numbers = [body.add(v.aval, self.arrays[i].dims) for v, i in zip(jaxpr.invars, given, strict=True)]
        body.bind(jaxpr.invars, numbers)
        outputs = body.run(jaxpr)
        program = body.program(numbers, outputs)
        return self._add_loop(equation, reads, [program.arrays[i].dims for i in outputs], program, 1)

    def _add_loop(
        self,
        equation: Any,
        reads: list[int],
        dims: Sequence[Dims],
        program: Program,
        trips: int,
        over: str | None = None,
    ) -> list[int]:
        writes = [self.add(out.aval, each) for out, each in zip(equation.outvars, dims, strict=True)]
        self._sums("scan", reads, writes, ())
        name = equation.primitive.name
        unrolled = equation.params.get("unroll", 1) >= max(trips, 2)
        step = Step(name=name, reads=reads, writes=writes, body=program, trips=trips, over=over)
        self.steps.append(replace(step, unrolled=unrolled))
        return writes

    def root(self, number: int) -> int:
        """Return the number of the array in memory of which this is a view."""
        return root(self.same, number)

    def program(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        """Complete the sums that nothing has read, and fuse the operations."""
        for i in list(self.partial):
            self._complete(i, self.partial.pop(i))
        changes = [*self.resharded, *self.moves.values()]
        found = Unfused(self.arrays, self.steps, self.same, self.constants, changes, self.for_gpus)
        return fuse(found, inputs, outputs)
