"""Split a traced program into two: the first computes some outputs, the second the others, nothing twice.

Next: `deferred_outputs.py`, which splits functions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Literal

from shardtrain.jaxpr.equations import INLINED, scan_counts

REPEATED = ("broadcast_in_dim", "convert_element_type", "iota")
"""Primitives that both programs apply if their result is larger than their inputs."""


@dataclass(frozen=True, eq=False)
class _Array:
    """A variable of a program whose calls are inlined."""

    num_bytes: int = 0


@dataclass(frozen=True, eq=False)
class _Constant:
    """A value that is known before the program runs."""

    value: Any
    num_bytes: int = 0


class _Operation(NamedTuple):
    """A step of a program.

    Args:
      reads: the inputs, each an `_Array` or a `_Constant`.
      writes: the outputs.
      compute: values of the inputs -> values of the outputs.
    """

    reads: Sequence[Any]
    writes: Sequence[_Array]
    compute: Callable[[list[Any]], Sequence[Any]]


class _Program:
    """One of the two programs of a split, filled from its last operation to its first.

    Args:
      outputs: what it returns.
    """

    def __init__(self, outputs: Iterable[Any]) -> None:
        self.outputs = list(outputs)
        # used as sets that keep their order, so that programs are the same in each process
        self._needed, self._made = dict.fromkeys(self.outputs), dict[Any, None]()
        self._operations: list[_Operation] = []

    def needs(self, array: Any) -> bool:
        """Return whether an operation so far, or an output, reads an array."""
        return array in self._needed

    def prepend(self, operation: _Operation) -> None:
        """Add an operation before all others."""
        self._operations.insert(0, operation)
        self._needed.update(dict.fromkeys(operation.reads))
        self._made.update(dict.fromkeys(operation.writes))

    def find_taken(self, other: "_Program") -> list[Any]:
        """Return the arrays that this program needs and only the other one makes."""
        return [x for x in self._needed if x in other._made and x not in self._made]

    def run(self, given: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return the outputs.

        Args:
          given: (array, its value) for every array that the program reads and does not make.
        """
        values = dict(given)

        def read(array: Any) -> Any:
            return array.value if isinstance(array, _Constant) else values[array]

        for operation in self._operations:
            values.update(
                zip(operation.writes, operation.compute(list(map(read, operation.reads))), strict=True)
            )
        return list(map(read, self.outputs))


class Split:
    """The two programs of a jaxpr.

    The first program has the equations on which the outputs of now depend; a scan is split into two scans.

    Args:
      jaxpr: closed.
      now: of each output, whether it is needed now.
      later: of each output, whether it is needed later.
    """

    def __init__(self, jaxpr: Any, now: Sequence[bool], later: Sequence[bool]) -> None:
        self.inputs = [_Array(_num_bytes(x)) for x in jaxpr.jaxpr.invars]
        equations, outputs = _flatten(jaxpr, self.inputs)
        self.now, self.later = _Program(compress(outputs, now)), _Program(compress(outputs, later))
        for equation, reads, writes in reversed(equations):
            self._add(equation, reads, writes)
        self.kept = self.later.find_taken(self.now)

    def _add(self, equation: Any, reads: list[Any], writes: list[_Array]) -> None:
        now = list(map(self.now.needs, writes))
        later = [self.later.needs(x) and not yes for x, yes in zip(writes, now, strict=True)]
        if any(now) and any(later) and equation.primitive.name == "scan":
            first, second = _SplitScan(equation, now, later).operations(reads, writes)
            self.now.prepend(first)
            self.later.prepend(second)
            return
        whole = _Operation(reads, writes, partial(bind, equation))
        if any(now):
            self.now.prepend(whole)
            is_larger = sum(x.num_bytes for x in writes) > sum(x.num_bytes for x in reads)
            if equation.primitive.name in REPEATED and is_larger and any(map(self.later.needs, writes)):
                self.later.prepend(whole)
        elif any(later):
            self.later.prepend(whole)


_Equation = tuple[Any, list[Any], list[_Array]]
"""(equation, its inputs, its outputs)."""


def _flatten(jaxpr: Any, inputs: Sequence[Any]) -> tuple[list[_Equation], list[Any]]:
    """Return all equations, calls inlined, and the outputs."""
    consts = map(_Constant, getattr(jaxpr, "consts", ()))
    program = getattr(jaxpr, "jaxpr", jaxpr)
    arrays: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *inputs], strict=True))
    found: list[_Equation] = []

    def read(variable: Any) -> Any:
        return _Constant(variable.val) if isinstance(variable, Literal) else arrays[variable]

    for equation in program.eqns:
        reads = list(map(read, equation.invars))
        if equation.primitive.name in INLINED:
            inner, writes = _flatten(equation.params[INLINED[equation.primitive.name]], reads)
            found += inner
        else:
            writes = [_Array(_num_bytes(x)) for x in equation.outvars]
            found.append((equation, reads, writes))
        arrays.update(zip(equation.outvars, writes, strict=True))
    return found, list(map(read, program.outvars))


class _SplitScan:
    """The two scans of a scan: the first stacks what the later one needs of each step.

    Args:
      equation: the scan.
      now: of each output, whether it is needed now.
      later: of each output, whether it is needed later and not now.
    """

    def __init__(self, equation: Any, now: list[bool], later: list[bool]) -> None:
        jaxpr = equation.params["jaxpr"]
        self._options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
        first_carried, self._num_carried = scan_counts(equation)
        first_scanned = first_carried + self._num_carried
        self._carried = slice(first_carried, first_scanned)
        self._consts, self._scanned = slice(0, first_carried), slice(first_scanned, None)
        self._split_body(jaxpr, now, later)
        self._stacked = [_Array(self._options["length"] * x.num_bytes) for x in self._kept]

    def _split_body(self, jaxpr: Any, now: list[bool], later: list[bool]) -> None:
        """Split a step: what it carries to the next one may need more to be carried."""
        count = self._num_carried
        while True:
            split = Split(jaxpr, now, later)
            carried = split.inputs[self._carried]
            more_now = [yes or split.now.needs(x) for yes, x in zip(now, carried, strict=False)]
            more_later = [
                not first and (yes or split.later.needs(x))
                for first, yes, x in zip(more_now, later, carried, strict=False)
            ]
            if (more_now, more_later) == (now[:count], later[:count]):
                break
            now, later = more_now + now[count:], more_later + later[count:]
        self._split, self._now, self._later = split, now, later
        # the later scan may also read what the first one carries
        both = [x for x, yes in zip(carried, now, strict=False) if yes and split.later.needs(x)]
        self._kept = [*split.kept, *both]
        split.now.outputs += self._kept

    def operations(self, reads: list[Any], writes: list[_Array]) -> tuple[_Operation, _Operation]:
        """Return both scans; the first one also writes what is stacked, and the later one reads it."""
        first = self._scan(self._split.now, self._now, reads, writes, [])
        later = self._scan(self._split.later, self._later, reads, writes, self._kept)
        return (
            first._replace(writes=[*first.writes, *self._stacked]),
            later._replace(reads=[*later.reads, *self._stacked]),
        )

    def _scan(
        self, program: _Program, mine: list[bool], reads: list[Any], writes: list[_Array], kept: list[_Array]
    ) -> _Operation:
        inputs = self._split.inputs
        is_needed = list(map(program.needs, inputs))
        is_needed[self._carried] = mine[: self._num_carried]
        consts, carried, scanned = (
            list(compress(inputs[group], is_needed[group]))
            for group in (self._consts, self._carried, self._scanned)
        )

        def compute(values: list[Any]) -> Sequence[Any]:
            first, last = len(consts), len(consts) + len(carried)
            known = list(zip(consts, values[:first], strict=True))

            def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
                given = zip([*carried, *scanned, *kept], [*carry, *rows], strict=True)
                found = program.run([*known, *given])
                return found[: len(carried)], found[len(carried) :]

            final, rows = lax.scan(step, values[first:last], values[last:], **self._options)
            return [*final, *rows]

        return _Operation(list(compress(reads, is_needed)), list(compress(writes, mine)), compute)


def bind(equation: Any, values: list[Any]) -> Sequence[Any]:
    """Compute the outputs of an equation."""
    primitive = equation.primitive
    with equation.ctx.manager:
        found = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return found if primitive.multiple_results else [found]


def _num_bytes(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize
