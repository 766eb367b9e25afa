"""Trace a model and its loss into a flat list of equations, and find the values that a cut would send.

A value that depends on parameters and on the batch is sent from part to part; everything else (masks, random
numbers, casts of weights) is recomputed in each part that reads it. Next: `traced_cut.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from shardtrain.jaxpr.split import bind

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Primitive that only calls a program -> the name of its parameter that is the program."""

REMATS = ("remat2", "checkpoint")
"""Calls that are recomputed in the backward. They stay whole unless they read most of the parameters."""


class Inliner:
    """Evaluates a program with its calls replaced by the called programs.

    Args:
      sizes_bytes: the bytes of each weight; weights come first among the inputs.
    """

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self._sizes_bytes = sizes_bytes

    def run(self, traced: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the program."""
        numbers = range(len(self._sizes_bytes))
        of_rest = [None] * (len(inputs) - len(numbers))
        return self._run(traced, inputs, [*(frozenset([number]) for number in numbers), *of_rest])[0]

    def _run(
        self, traced: ClosedJaxpr, inputs: Sequence[Any], roots: Sequence[frozenset[int] | None]
    ) -> tuple[list[Any], list[frozenset[int] | None]]:
        """Return the outputs, and the weights that each depends on; None if it depends on the batch too."""
        jaxpr = traced.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))
        made_of: dict[Any, frozenset[int] | None] = dict(zip(jaxpr.invars, roots, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else values[v]

        def weights(v: Any) -> frozenset[int] | None:
            return frozenset() if isinstance(v, Literal) else made_of.get(v, frozenset())

        for equation in jaxpr.eqns:
            found = [weights(v) for v in equation.invars]
            called = self._called(equation, frozenset().union(*(each for each in found if each)))
            if called is not None:
                outputs, sources = self._run(called, [read(v) for v in equation.invars], found)
            else:
                outputs = bind(equation, [read(v) for v in equation.invars])
                alone = [each for each in found if each is not None]
                joined = None if len(alone) < len(found) else frozenset[int]().union(*alone)
                sources = [joined] * len(outputs)
            values |= dict(zip(equation.outvars, outputs, strict=True))
            made_of |= dict(zip(equation.outvars, sources, strict=True))
        return [read(v) for v in jaxpr.outvars], [weights(v) for v in jaxpr.outvars]

    def _called(self, equation: JaxprEqn, read: frozenset[int]) -> ClosedJaxpr | None:
        """Return the program to evaluate in place of a call; None if the equation stays as it is."""
        if len(read) < 2:
            return None
        name = equation.primitive.name
        if name in CALLS:
            return equation.params[CALLS[name]]
        if name in REMATS and 2 * sum(self._sizes_bytes[n] for n in read) > sum(self._sizes_bytes):
            return ClosedJaxpr(equation.params["jaxpr"], ())
        return None


class Signature(NamedTuple):
    """The dtype of a sent value, and its shape without the rows."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[rows{''.join(f',{size}' for size in self.shape)}]"

    @property
    def num_bytes(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class PartProgram:
    """The equations of one part.

    Args:
      closed: the program; its inputs are the weights, rest and received values below, its outputs are `sent`,
        then the model state, then (in the last part) the results of the whole program.
      weights: the numbers of the parameters and model states that it reads.
      rest: the numbers of the other inputs (key and batch) that it reads.
      received: the values that it reads among those that cross its beginning.
      sent: the values that it computes among those that cross its end.
    """

    closed: ClosedJaxpr
    weights: tuple[int, ...]
    rest: tuple[int, ...]
    received: tuple[Var, ...]
    sent: tuple[Var, ...]


class Program:
    """The equations of a function (weights, rest) -> (new model states, results), traced without computing.

    Args:
      function: takes two lists of arrays; it returns the states as a list, and the results as any tree.
      weights: shapes of the parameters, then of the model states.
      num_states: number of model states.
      rest: shapes of all other inputs: key and batch.
    """

    def __init__(
        self, function: Callable[..., Any], weights: Sequence[Any], num_states: int, rest: Sequence[Any]
    ) -> None:
        self.num_weights, self.num_states = len(weights), num_states
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(list(weights), list(rest))
        self.result_structure = jax.tree.structure(shapes[1])
        sizes_bytes = [x.size * x.dtype.itemsize for x in weights]
        inline = Inliner(sizes_bytes)
        # traced again with calls replaced by what they call
        self._close = jax.make_jaxpr(lambda *inputs: inline.run(traced, inputs))(*weights, *rest)
        self.jaxpr: Jaxpr = self._close.jaxpr
        self.equations: Sequence[JaxprEqn] = self.jaxpr.eqns
        self._find_dependences()

    def _find_dependences(self) -> None:
        """Find the values that are sent, and the weights that each equation reads, directly or indirectly."""
        inputs = self.jaxpr.invars
        # value -> numbers of the weights that it depends on, if it does not depend on the batch
        self._roots: dict[Var, frozenset[int]] = {
            v: frozenset([number]) for number, v in enumerate(inputs[: self.num_weights])
        }
        of_batch = {v for v in inputs[self.num_weights :] if not _is_key(v)}
        of_weights: set[Var] = set(inputs[: self.num_weights])
        self.is_sent: list[bool] = []
        self.reads: list[frozenset[int]] = []
        for equation in self.equations:
            given = [v for v in equation.invars if isinstance(v, Var)]
            outputs = equation.outvars
            roots = frozenset[int]().union(*(self._roots.get(v, frozenset()) for v in given))
            if any(v in of_batch for v in given):
                of_batch.update(outputs)
            if any(v in of_weights for v in given):
                of_weights.update(outputs)
            is_sent = bool(outputs) and outputs[0] in of_batch and outputs[0] in of_weights
            self.is_sent.append(is_sent)
            self.reads.append(roots)
            if not is_sent:
                self._roots.update(dict.fromkeys(outputs, roots))

    @property
    def num_params(self) -> int:
        """The number of parameters; the model states follow them."""
        return self.num_weights - self.num_states

    @property
    def new_states(self) -> list[Any]:
        """The model states after the program."""
        return self.jaxpr.outvars[: self.num_states]

    @property
    def results(self) -> list[Any]:
        """The outputs of the program without the model states."""
        return self.jaxpr.outvars[self.num_states :]

    @cached_property
    def _is_needed(self) -> list[bool]:
        """Whether the outputs of the program depend on each equation."""
        needed = {v for v in self.jaxpr.outvars if isinstance(v, Var)}
        found = []
        for equation in reversed(self.equations):
            is_needed = bool(equation.effects) or any(v in needed for v in equation.outvars)
            if is_needed:
                needed.update(v for v in equation.invars if isinstance(v, Var))
            found.append(is_needed)
        return found[::-1]

    @cached_property
    def defined(self) -> dict[Var, int]:
        """The number of the equation that computes each value that may be sent."""
        return {
            v: number
            for number, equation in enumerate(self.equations)
            if self.is_sent[number] and self._is_needed[number]
            for v in equation.outvars
        }

    @cached_property
    def last_use(self) -> dict[Var, int]:
        """The last equation that reads each of these values; the number of equations for a result."""
        found: dict[Var, int] = {}
        for number, equation in enumerate(self.equations):
            if self._is_needed[number]:
                found.update({v: number for v in equation.invars if isinstance(v, Var) and v in self.defined})
        ends = {v: len(self.equations) for v in self.results if isinstance(v, Var) and v in self.defined}
        return found | ends

    @cached_property
    def first_use(self) -> dict[int, int]:
        """The first equation that reads each weight, among equations that compute values to send."""
        found: dict[int, int] = {}
        for number in self._working():
            for weight in self.reads[number]:
                found.setdefault(weight, number)
        return found

    @cached_property
    def state_spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last equation that reads or updates each model state."""
        spans: dict[int, tuple[int, int]] = {}

        def add(state: int, number: int) -> None:
            begin, end = spans.get(state, (number, number))
            spans[state] = (min(begin, number), max(end, number))

        for number in self._working():
            for weight in self.reads[number]:
                if weight >= self.num_params:
                    add(weight - self.num_params, number)
        for state, v in enumerate(self.new_states):
            if isinstance(v, Var) and v in self.defined:
                add(state, self.defined[v])
        return spans

    def _working(self) -> Iterator[int]:
        """Yield the numbers of the needed equations that compute values to send."""
        return (n for n in range(len(self.equations)) if self.is_sent[n] and self._is_needed[n])

    @cached_property
    def num_bytes(self) -> list[int]:
        """The bytes that would be sent at each position: before each equation, and after the last one."""
        steps = [0] * (len(self.equations) + 2)
        for v, end in self.last_use.items():
            num_bytes = get_aval(v).size * get_aval(v).dtype.itemsize
            steps[self.defined[v] + 1] += num_bytes
            steps[min(end, len(self.equations)) + 1] -= num_bytes
        return list(accumulate(steps))[: len(self.equations) + 1]

    def crossing(self, position: int) -> list[Var]:
        """Return the values that are computed before a position and read after it, in order."""
        return [v for v, number in self.defined.items() if number < position <= self.last_use.get(v, -1)]

    def signature(self, position: int) -> tuple[Signature, ...]:
        """Return the dtypes and shapes of the values that cross a position."""
        return tuple(
            Signature(str(get_aval(v).dtype), get_aval(v).shape[1:]) for v in self.crossing(position)
        )

    def part(self, begin: int, end: int, states: Sequence[int]) -> PartProgram:
        """Return the part between two positions, which has some of the model states."""
        is_last = end == len(self.equations)
        sent = tuple(v for v in self.crossing(end) if self.defined[v] >= begin) if not is_last else ()
        outputs = [*sent, *(self.new_states[state] for state in states), *(self.results if is_last else ())]
        needed = {v for v in outputs if isinstance(v, Var)}
        kept = []
        # backwards: its own equations, and equations of values that each part recomputes
        for number in reversed(range(len(self.equations))):
            equation = self.equations[number]
            is_own = begin <= number < end
            wanted = any(v in needed for v in equation.outvars) or (is_own and bool(equation.effects))
            if wanted and (is_own or not self.is_sent[number]):
                kept.append(equation)
                needed.update(v for v in equation.invars if isinstance(v, Var))
        inputs = self.jaxpr.invars
        weights = tuple(n for n, v in enumerate(inputs[: self.num_weights]) if v in needed)
        rest = tuple(n for n, v in enumerate(inputs[self.num_weights :]) if v in needed)
        received = tuple(v for v in self.crossing(begin) if v in needed)
        jaxpr = self.jaxpr.replace(
            invars=[
                *(inputs[n] for n in weights),
                *(inputs[self.num_weights + n] for n in rest),
                *received,
            ],
            outvars=outputs,
            eqns=kept[::-1],
            effects=frozenset().union(*(equation.effects for equation in kept)),
        )
        closed = ClosedJaxpr(jaxpr, self._close.consts)
        return PartProgram(closed=closed, weights=weights, rest=rest, received=received, sent=sent)


def get_aval(v: Any) -> Any:
    """Return the shape and dtype of a value of a program."""
    return v.aval


def _is_key(v: Var) -> bool:
    return jnp.issubdtype(get_aval(v).dtype, jax.dtypes.prng_key)
