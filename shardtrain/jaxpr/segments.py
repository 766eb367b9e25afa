"""Trace a model and its loss into a flat list of equations, and find the values that a cut would send.

A value that depends on parameters and on the batch is sent from part to part; everything else (masks, random
numbers, casts of weights) is recomputed in each part that reads it. Next: `pipeline/traced_cut.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from shardtrain.jaxpr.cut import ProgramPart, build_part, select_equations
from shardtrain.jaxpr.equations import CALLS, REMATS, find_call, list_programs
from shardtrain.jaxpr.forward import inline

WEIGHTS, BATCH = 1, 2
"""Bits of the inputs that a value depends on; a key is neither."""


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
        self._sizes_bytes = [x.size * x.dtype.itemsize for x in weights]
        inputs = traced.jaxpr.invars
        # value -> numbers of the weights that it depends on, if it does not depend on the batch
        self._roots = {v: frozenset([number]) for number, v in enumerate(inputs[: self.num_weights])}
        self._groups: dict[Any, int] = dict.fromkeys(inputs[: self.num_weights], WEIGHTS)
        self._groups |= {v: 0 if _is_key(v) else BATCH for v in inputs[self.num_weights :]}
        # of each equation, whether its values are sent, and the weights that it reads, directly or indirectly
        self.is_sent: list[bool] = []
        self.reads: list[frozenset[int]] = []
        self._closed = inline(traced, self._place)
        self.jaxpr: Jaxpr = self._closed.jaxpr
        self.equations: Sequence[Any] = self.jaxpr.eqns

    def _place(self, equation: Any) -> ClosedJaxpr | None:
        """Return the program to inline in place of a call; None if the equation stays, and note it."""
        given = [v for v in equation.invars if isinstance(v, Var)]
        roots = frozenset[int]().union(*(self._roots.get(v, ()) for v in given))
        called = find_call(equation, (*CALLS, *REMATS)) if len(roots) > 1 else None
        # what is computed again in the backward pass stays whole unless it reads most of the parameters
        most = 2 * sum(self._sizes_bytes[n] for n in roots) > sum(self._sizes_bytes)
        if called is not None and (most or equation.primitive.name in CALLS):
            return called
        groups = reduce(or_, (self._groups.get(v, 0) for v in given), 0)
        self._groups.update(dict.fromkeys(equation.outvars, groups))
        self.is_sent.append(bool(equation.outvars) and groups == WEIGHTS | BATCH)
        self.reads.append(roots)
        if not self.is_sent[-1]:
            self._roots.update(dict.fromkeys(equation.outvars, roots))
        return None

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
    def _needed(self) -> Mapping[int, Any]:
        """The equations on which outputs or effects depend, by number."""
        choose = lambda number, equation, is_needed: is_needed or bool(equation.effects)  # noqa: E731
        return select_equations(self._closed, self.jaxpr.outvars, choose)[0]

    @cached_property
    def defined(self) -> dict[Any, int]:
        """The number of the equation that computes each value that may be sent."""
        return {
            v: number
            for number, equation in self._needed.items()
            if self.is_sent[number]
            for v in equation.outvars
        }

    @cached_property
    def last_use(self) -> dict[Any, int]:
        """The last equation that reads each of these values; the number of equations for a result."""
        found: dict[Any, int] = {}
        for number, equation in self._needed.items():
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
        return (number for number in self._needed if self.is_sent[number])

    @cached_property
    def num_bytes(self) -> list[int]:
        """The bytes that would be sent at each position: before each equation, and after the last one."""
        steps = [0] * (len(self.equations) + 2)
        for v, end in self.last_use.items():
            num_bytes = v.aval.size * v.aval.dtype.itemsize
            steps[self.defined[v] + 1] += num_bytes
            steps[min(end, len(self.equations)) + 1] -= num_bytes
        return list(accumulate(steps))[: len(self.equations) + 1]

    def crossing(self, position: int) -> list[Any]:
        """Return the values that are computed before a position and read after it, in order."""
        return [v for v, number in self.defined.items() if number < position <= self.last_use.get(v, -1)]

    def signature(self, position: int) -> tuple[Signature, ...]:
        """Return the dtypes and shapes of the values that cross a position."""
        return tuple(Signature(str(v.aval.dtype), v.aval.shape[1:]) for v in self.crossing(position))

    def part(self, begin: int, end: int, states: Sequence[int]) -> ProgramPart:
        """Return the part between two positions.

        Args:
          begin, end: the positions.
          states: the numbers of the model states that it returns; the last part returns the results too.
        """
        is_last = end == len(self.equations)
        sent = tuple(v for v in self.crossing(end) if self.defined[v] >= begin) if not is_last else ()
        returns = [*states, *(range(self.num_states, len(self.jaxpr.outvars)) if is_last else ())]

        # its own equations, and equations of values that each part recomputes
        def choose(number: int, equation: Any, is_needed: bool) -> bool:
            if begin <= number < end:
                return is_needed or bool(equation.effects)
            return is_needed and not self.is_sent[number]

        outputs = [*(self.jaxpr.outvars[n] for n in returns), *sent]
        kept, needed = select_equations(self._closed, outputs, choose)
        received = [v for v in self.crossing(begin) if v in needed]
        return build_part(self._closed, kept.values(), needed, received, returns, sent)

    @property
    def large_operations(self) -> list[tuple[str, frozenset[int]]]:
        """The operations that contain a program and read several weights: (primitive, weights)."""
        both = zip(self.equations, self.reads, strict=True)
        return [(e.primitive.name, read) for e, read in both if len(read) > 1 and list_programs(e)]


def _is_key(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
