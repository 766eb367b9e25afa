"""Walk a traced computation, and list its operations on arrays with named dims and its incomplete sums.

Next: `trace.py`, which traces the loss of a model; `named_dims.py`, `fusion.py`.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from shardtrain import axes
from shardtrain.jaxpr.equations import REMATS, find_largest_run, scan_counts
from shardtrain.jaxpr.forward import forward
from shardtrain.jaxpr.operators import find_scope
from shardtrain.plan.device_calls import NAME, AttentionCall
from shardtrain.plan.fusion import ALIASES, MATERIAL, Operation, UnfusedProgram, fuse
from shardtrain.plan.named_dims import CUMULATIVE, find_names, merge_names
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, Array, Dims, Program, Resharding

LINEAR = ("add", "add_any", "neg", "convert_element_type", "transpose")
"""Operations that partial sums pass unadded, so that the sum of several is completed once."""

LOOKUPS = {"gather": 0, "scatter-add": 2}
"""Operation -> number of its operand with the rows that it looks up or adds."""


class PartialSum(NamedTuple):
    """A partial sum on each device.

    Args:
      summed: names of the dims that are split over these devices.
      dims: names of the dims of the sum where it is made.
      rows: number of the table of a lookup, or of the rows that are summed into a table.
    """

    summed: tuple[str, ...]
    dims: Dims
    rows: int | None = None


def count_terms(number: int, makers: Mapping[int, Operation], constants: Set[int]) -> int:
    """Count the arrays that jax adds up to an array, such as the gradients of a table that is used twice.

    Args:
      number: number of the array.
      makers: number of an array -> the operation that writes it.
      constants: numbers of arrays that are computed from constants only.
    """
    maker = makers.get(number)
    if number in constants:
        return 0
    if maker is not None and maker.name == "add_any":
        return sum(count_terms(each, makers, constants) for each in maker.reads)
    if maker is not None and maker.name in (*ALIASES, "convert_element_type", "transpose"):
        return count_terms(maker.reads[0], makers, constants)
    return 1


OF_EXAMPLES = (axes.BATCH, ARRIVED)
"""Dims of examples. Sums over them are gradients of parameters, whose collectives `traffic.py` counts."""


@dataclass(kw_only=True)
class Walk(UnfusedProgram):
    """The operations that a walk has found so far.

    Args:
      partial: number of an array -> the partial sum that it is.
      constrained: numbers of arrays that are named by a constraint.
      moves: number of an array -> the resharding that made it.
      recomputes: whether it is in a program that runs again in the backward pass.
      alike: different names of one dim.
    """

    partial: dict[int, PartialSum] = field(default_factory=dict)
    constrained: set[int] = field(default_factory=set)
    moves: dict[int, Resharding] = field(default_factory=dict)
    recomputes: bool = False
    alike: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, aval: Any, dims: Dims | None = None) -> int:
        """Add an array; return its number."""
        shape = tuple(getattr(aval, "shape", ()))
        item_bytes = getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.arrays.append(Array(shape=shape, item_bytes=item_bytes, dims=dims or (None,) * len(shape)))
        return len(self.arrays) - 1

    def add_inputs(self, jaxpr: Any, dims: Sequence[Dims | None]) -> list[int]:
        """Add the inputs of a jaxpr as arrays with names of their dims; return their numbers."""
        return [self.add(variable.aval, each) for variable, each in zip(jaxpr.invars, dims, strict=True)]

    def name_result(self, number: int, dims: Dims | None, of_parameter: bool) -> None:
        """Name the dims of a result, and of the array in memory that it is a view of if the shapes agree."""
        for i in (number, self.find_root(number)):
            array = replace(self.arrays[i], of_parameter=of_parameter)
            if dims is not None and len(dims) == len(array.shape):
                array = replace(array, dims=merge_names(array.dims, dims))
            self.arrays[i] = array

    def run(self, program: Any, inputs: Sequence[int]) -> list[int]:
        """Add the operations of a program; return the numbers of its outputs."""
        return forward(program, inputs, self._add_equation, self._add_constant)

    def _add_constant(self, atom: Any) -> int:
        number = self.add(atom.aval)
        if hasattr(atom, "val"):
            self.constants.add(number)
        return number

    def _add_equation(self, equation: Any, reads: list[int]) -> list[int]:
        add_loop = {"scan": self._add_scan, "while": self._add_while}.get(equation.primitive.name)
        if add_loop is not None:
            return add_loop(equation, reads)
        if equation.primitive.name == NAME:
            return self._add_call(equation.params, reads)
        # the branch with the most operations stands for all
        if (inner := find_largest_run(equation, reads)) is not None:
            before, self.recomputes = self.recomputes, self.recomputes or equation.primitive.name in REMATS
            found = self.run(*inner)
            self.recomputes = before
            return found
        return self._add_operation(equation, reads)

    def _add_call(self, params: Any, reads: list[int]) -> list[int]:
        """Add a call that devices compute by their own code, whose results name their dims."""
        call, results = params["call"], params["results"]
        if isinstance(call, AttentionCall):
            roots = set(map(self.find_root, reads))
            of_same = (each for each in self.operations if roots.issuperset(map(self.find_root, each.reads)))
            call = call.merge(each.call for each in of_same)
        writes = [self.add(jax.ShapeDtypeStruct(shape, dtype), dims) for shape, dtype, dims in results]
        waiting = self.partial.pop(reads[0], None) if call.linear else None
        self._note_sums(NAME, reads, writes, ())
        if waiting is not None:
            passed = waiting._replace(dims=self.arrays[writes[0]].dims, rows=None)
            if call.completes:
                self._complete(writes[0], passed)
            else:
                self.partial[writes[0]] = passed
        self.operations.append(Operation(name=NAME, reads=reads, writes=writes, call=call))
        return writes

    def _add_operation(self, equation: Any, reads: list[int]) -> list[int]:
        primitive = equation.primitive.name
        if primitive in CUMULATIVE:
            reads = [self._gather(reads[0], equation.params["axis"])]
        found = find_names(equation, [self.arrays[i].dims for i in reads])
        writes = [self.add(out.aval, dims) for out, dims in zip(equation.outvars, found.outputs, strict=True)]
        self.alike += found.alike
        if primitive == "sharding_constraint":
            self._constrain(equation.params["sharding"].spec, reads[0], writes[0])
        elif primitive in ALIASES:
            self.same[writes[0]] = reads[0]
            if reads[0] in self.partial:
                before = self.partial.pop(reads[0])
                self.partial[writes[0]] = before._replace(dims=self.arrays[writes[0]].dims)
        else:
            self._note_sums(primitive, reads, writes, found.summed)
            if primitive not in MATERIAL and all(self.find_root(i) in self.constants for i in reads):
                self.constants.update(writes)
        one = Operation(name=primitive, reads=reads, writes=writes, flops=found.flops, summed=found.summed)
        one = replace(one, grouped=found.grouped, scope=find_scope(equation), recomputes=self.recomputes)
        self.operations.append(one)
        return writes

    def _gather(self, number: int, axis: int) -> int:
        """Return the number of an array whose dim `axis` is whole on each device."""
        before = self.arrays[number]
        if before.dims[axis] is not None:
            dims = (*before.dims[:axis], None, *before.dims[axis + 1 :])
            found = len(self.arrays)
            self.arrays.append(replace(before, dims=dims))
            self.moves[found] = Resharding(array=found, before=before.dims, source=number)
            number = found
        return number

    def _note_sums(
        self, primitive: str, reads: Sequence[int], writes: Sequence[int], summed: Sequence[str]
    ) -> None:
        """Note the partial sums that an operation makes, and those that it needs complete."""
        # arrived tokens are of examples and of positions
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
                    # the input of an elementwise operation is sharded as its result is
                    alike = writes and self.arrays[writes[0]].shape == self.arrays[i].shape
                    self._complete(writes[0] if alike and i not in self.moves else i, before)
        if kept:
            summed = waiting.pop()
        if summed:
            self.partial.update((i, PartialSum(summed, self.arrays[i].dims, rows)) for i in writes)

    def _complete(self, number: int, before: PartialSum) -> None:
        """Note that a sum over sharded dims is complete from this array on."""
        move = self.moves.pop(number, None)
        source = None if move is None else move.source
        rows = None if before.rows is None else self.find_root(before.rows)
        change = Resharding(array=number, before=before.dims, summed=before.summed, source=source, rows=rows)
        self.reshardings.append(change)

    def _constrain(self, spec: Sequence[Any], before: int, after: int) -> None:
        """Name the dims of an array by a constraint; dims that it does not name become unsharded."""
        shape = self.arrays[after].shape
        dims = tuple(
            (entry[0] if entry else None) if isinstance(entry, tuple) else entry
            for entry in (*spec, *(None,) * (len(shape) - len(spec)))
        )
        # channels keep their number
        numbers = (name.partition(":")[1:] if name else () for name in self.arrays[before].dims)
        dims = tuple(name and "".join((name, *number)) for name, number in zip(dims, numbers, strict=True))
        first = self.find_root(before)
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
            change = Resharding(array=after, before=self.arrays[before].dims, source=before)
            self.arrays[after] = replace(self.arrays[after], dims=dims)
            self.moves[after] = change
        if waiting is not None:
            self.partial[after] = waiting

    def _add_scan(self, equation: Any, reads: list[int]) -> list[int]:
        jaxpr = equation.params["jaxpr"].jaxpr
        consts, carried = scan_counts(equation)
        given = [self.arrays[i].dims for i in reads]
        given[consts + carried :] = [dims[1:] for dims in given[consts + carried :]]
        # the body may be what names the dims of carried arrays
        for _ in range(2):
            body = Walk(for_gpus=self.for_gpus)
            inputs = body.add_inputs(jaxpr, given)
            pairs = zip(inputs[:consts], reads[:consts], strict=True)
            body.constants.update(inner for inner, i in pairs if self.find_root(i) in self.constants)
            outputs = body.run(jaxpr, inputs)
            for i in range(carried):
                given[consts + i] = merge_names(given[consts + i], body.arrays[outputs[i]].dims)
        self.alike += body.alike
        program = body.finish(inputs, outputs)
        over = next(filter(None, (self.arrays[i].dims[0] for i in reads[consts + carried :])), None)
        dims = [program.arrays[i].dims for i in outputs]
        dims[carried:] = [(over, *each) for each in dims[carried:]]
        return self._add_loop(equation, reads, dims, program, equation.params["length"], over)

    def _add_while(self, equation: Any, reads: list[int]) -> list[int]:
        """Add a loop whose number of trips is unknown before it runs: its body counts once."""
        jaxpr = equation.params["body_jaxpr"].jaxpr
        body = Walk(for_gpus=self.for_gpus)
        inputs = body.add_inputs(jaxpr, [self.arrays[i].dims for i in reads[-len(jaxpr.invars) :]])
        outputs = body.run(jaxpr, inputs)
        program = body.finish(inputs, outputs)
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
        self._note_sums("scan", reads, writes, ())
        loop = Operation(
            name=equation.primitive.name,
            reads=reads,
            writes=writes,
            body=program,
            trips=trips,
            unrolled=equation.params.get("unroll", 1) >= max(trips, 2),
            over=over,
        )
        self.operations.append(loop)
        return writes

    def finish(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        """Complete the sums that nothing has read, and fuse the operations into a program."""
        for i in list(self.partial):
            self._complete(i, self.partial.pop(i))
        self.reshardings += self.moves.values()
        return fuse(self, inputs, outputs)
