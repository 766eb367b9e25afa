"""Trace the loss and the gradient of any Flax model into a program with named dims, without devices.

The constraints of the model name the dims of its activations, the model's own names those of its parameters;
`named_dims.py` carries them through all other operations, and `fusion.py` makes kernels of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh

from shardtrain import axes
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.plan.fusion import ALIASES, MATERIAL, Step, Unfused, fused, root
from shardtrain.plan.named_dims import Operands, merged, names_of
from shardtrain.plan.program import Array, Dims, Program, Resharded

LINEAR = ("add", "add_any", "neg", "convert_element_type", "transpose")
"""Operations by which the parts of a sum may stay apart: those of sums are added once, not one by one."""

CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the computation that an operation stands for."""

OPAQUE = ("pallas_call", "reduce", "reduce_window", "custom_linear_solve")
"""Operations that hold a computation of single elements or of a kernel instead."""


def trace(
    function: Callable[..., Any],
    inputs: Any,
    names: Sequence[Dims | None],
    results: Sequence[Dims | None],
    of_parameters: Sequence[bool],
) -> Program:
    """Trace a function into a program.

    Args:
      function: its arrays are the leaves of its arguments and results.
      inputs: its arguments, trees of shapes.
      names: for each array of its arguments the names of its dims; None if it has none.
      results: the same for each array of its results.
      of_parameters: for each array of its results whether it is the gradient of a parameter.

    Returns:
      The program of unsharded arrays.
    """
    # a mesh with an axis for each dim, all of size 1: then a constraint's spec is the names of the dims
    known = {name for dims in (*names, *results) for name in dims or () if name}
    every = sorted(known | set(axes.DIMS))
    mesh = AbstractMesh((1,) * len(every), tuple(every))
    with activation_rules({name: (name,) for name in every}, mesh, "replicate"):
        traced = jax.make_jaxpr(function)(*inputs)
    walk = _Walk()
    of_inputs = [
        walk.add(variable.aval, dims) for variable, dims in zip(traced.jaxpr.invars, names, strict=True)
    ]
    walk.bind(traced.jaxpr.invars, of_inputs)
    outputs = walk.run(traced.jaxpr)
    for number, dims, of_parameter in zip(outputs, results, of_parameters, strict=True):
        walk.result(number, dims, of_parameter)
    return walk.program(of_inputs, outputs)


@dataclass(kw_only=True)
class _Walk:
    """The operations of a computation, found one after the other.

    Args:
      arrays: those found so far.
      steps: the operations found so far.
      same: number of an array -> that of the array in memory of which it is another view.
      partial: number of an array -> names of the dims over which its sum is not complete, and its own names
        when it was made.
      constrained: numbers of the arrays whose names are those of a constraint.
      constants: numbers of the arrays that are computed from constants alone.
      moves: number of an array -> the change of sharding that made it.
      resharded: sums that were completed.
      of: variable of jax -> number of its array.
    """

    arrays: list[Array] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    same: dict[int, int] = field(default_factory=dict)
    partial: dict[int, tuple[tuple[str, ...], Dims]] = field(default_factory=dict)
    constrained: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    moves: dict[int, Resharded] = field(default_factory=dict)
    resharded: list[Resharded] = field(default_factory=list)
    of: dict[Any, int] = field(default_factory=dict)

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
        self.arrays[number] = replace(array, dims=merged(array.dims, dims))

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
        if primitive == "cond":
            # the branch with the most operations stands for all
            branch = max(params["branches"], key=lambda each: len(each.jaxpr.eqns))
            return self._inlined(branch, reads[1:])
        inner = next((params[key] for key in CALLED if key in params), None)
        if inner is not None and primitive not in OPAQUE:
            return self._inlined(inner, reads)
        return self._operation(equation, reads)

    def _inlined(self, inner: Any, reads: list[int]) -> list[int]:
        jaxpr = getattr(inner, "jaxpr", inner)
        self.bind(jaxpr.invars, reads[len(reads) - len(jaxpr.invars) :])
        return self.run(jaxpr)

    def _operation(self, equation: Any, reads: list[int]) -> list[int]:
        primitive = equation.primitive.name
        found = names_of(
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
            self._constrained(equation.params["sharding"].spec, reads[0], writes[0])
        elif primitive in ALIASES:
            self.same[writes[0]] = reads[0]
            if reads[0] in self.partial:
                self.partial[writes[0]] = (self.partial.pop(reads[0])[0], self.arrays[writes[0]].dims)
        else:
            self._sums(primitive, reads, writes, found.summed)
            if primitive not in MATERIAL and all(self.root(i) in self.constants for i in reads):
                self.constants.update(writes)
        self.steps.append(
            Step(name=primitive, reads=reads, writes=writes, flops=found.flops, summed=found.summed)
        )
        return writes

    def _sums(
        self, primitive: str, reads: Sequence[int], writes: Sequence[int], summed: Sequence[str]
    ) -> None:
        """Note which arrays are parts of a sum until all devices have added theirs."""
        summed = tuple(name for name in summed if name != axes.BATCH)
        waiting = {self.partial[i][0] for i in reads if i in self.partial}
        kept = primitive in LINEAR and len(waiting) == 1 and all(i in self.partial for i in reads)
        for i in reads:
            if i in self.partial:
                over, before = self.partial.pop(i)
                if not kept:
                    # an operation on its elements gets it as its own result is sharded
                    alike = writes and self.arrays[writes[0]].shape == self.arrays[i].shape
                    self._complete(writes[0] if alike and i not in self.moves else i, over, before)
        if kept:
            summed = waiting.pop()
        if summed:
            self.partial.update((i, (summed, self.arrays[i].dims)) for i in writes)

    def _complete(self, number: int, summed: tuple[str, ...], before: Dims) -> None:
        """Note that a sum over sharded dims is complete from here on."""
        move = self.moves.pop(number, None)
        source = None if move is None else move.source
        self.resharded.append(Resharded(array=number, before=before, summed=summed, source=source))

    def _constrained(self, spec: Sequence[Any], before: int, after: int) -> None:
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
            waiting = waiting and (waiting[0], self.arrays[first].dims)
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
        consts, carried = params["num_consts"], params["num_carry"]
        given = [self.arrays[i].dims for i in reads]
        given[consts + carried :] = [dims[1:] for dims in given[consts + carried :]]
        # the names of what is carried may be known only from what the body makes of it
        for _ in range(2):
            body = _Walk()
            numbers = [body.add(v.aval, dims) for v, dims in zip(jaxpr.invars, given, strict=True)]
            body.bind(jaxpr.invars, numbers)
            body.constants.update(
                of_body
                for of_body, i in zip(numbers[:consts], reads[:consts], strict=True)
                if self.root(i) in self.constants
            )
            outputs = body.run(jaxpr)
            for i in range(carried):
                given[consts + i] = merged(given[consts + i], body.arrays[outputs[i]].dims)
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
        body = _Walk()
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
        self.steps.append(
            Step(
                name=equation.primitive.name,
                reads=reads,
                writes=writes,
                body=program,
                trips=trips,
                over=over,
            )
        )
        return writes

    def root(self, number: int) -> int:
        """Return the number of the array in memory of which this is a view."""
        return root(self.same, number)

    def program(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        """Complete the sums that nothing has read, and fuse the operations."""
        for i in list(self.partial):
            self._complete(i, *self.partial.pop(i))
        changes = [*self.resharded, *self.moves.values()]
        return fused(Unfused(self.arrays, self.steps, self.same, self.constants, changes), inputs, outputs)
