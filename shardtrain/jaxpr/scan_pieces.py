"""Evaluate a program with its long scans in pieces, so that parts of their results are ready early.

A backward pass through stacked layers is one reversed scan, whose gradients are all ready at its end. In
pieces, the gradients of the last layers are ready first. Next: `cut.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from shardtrain.jaxpr.cost import equation_cost, program_cost
from shardtrain.jaxpr.dims import find_moves
from shardtrain.jaxpr.equations import CALLS, CUSTOM_JVP, find_call, split_operands
from shardtrain.jaxpr.forward import bind, evaluate

ROW_BY_ROW = frozenset(
    (
        *("add", "add_any", "and", "convert_element_type", "copy", "div", "is_finite", "max", "min", "mul"),
        *("neg", "not", "or", "reduce_precision", "select_n", "sharding_constraint", "sub"),
    )
)
"""Elementwise primitives with one output."""

REARRANGING = ("transpose", "squeeze", "reduce_sum")
"""Primitives that rearrange or remove dims."""


@dataclass(frozen=True)
class Pieces:
    """An array in consecutive pieces along one of its dims.

    Args:
      dim: the dim.
      arrays: the pieces, in the order of their indices.
    """

    dim: int
    arrays: tuple[Any, ...]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first index of each piece, and the index after its last."""
        ends = list(accumulate(array.shape[self.dim] for array in self.arrays))
        return list(pairwise([0, *ends]))

    @property
    def whole(self) -> jax.Array:
        """The pieces as one array."""
        return jnp.concatenate(self.arrays, self.dim)


class PiecewiseProgram:
    """Evaluates a program with reversed scans in pieces, and the last microbatch outside the scan over all.

    Args:
      num_pieces: number of pieces of each reversed scan, limited to its steps.
      least: fraction of the program's cost below which a reversed scan stays whole.
    """

    def __init__(self, num_pieces: int, least: float = 0.1) -> None:
        self._num_pieces, self._least = num_pieces, least
        self._cost, self._is_in_microbatch = 0.0, False

    def run(self, traced: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a program, each an array or `Pieces`."""
        self._cost, self._is_in_microbatch = program_cost(traced), False
        return evaluate(traced, inputs, self._outputs)

    def _outputs(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if (called := find_call(equation, (*CALLS, CUSTOM_JVP))) is not None:
            return evaluate(called, inputs, self._outputs)
        if any(isinstance(x, Pieces) for x in inputs):
            found = piece_by_piece(equation, inputs)
            if found is not None:
                return [found]
            inputs = [x.whole if isinstance(x, Pieces) else x for x in inputs]
        if name == "scan":
            cost, length = equation_cost(equation), equation.params["length"]
            if equation.params["reverse"]:
                if length > 1 and self._num_pieces > 1 and cost >= self._least * self._cost:
                    return _run_in_pieces(equation, inputs, min(self._num_pieces, length))
            # most of the program: the microbatches
            elif cost > self._cost / 2 and not self._is_in_microbatch:
                return self._split_last_step(equation, inputs)
        return bind(equation, inputs)

    def _split_last_step(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        """Return the outputs of a scan whose last step is evaluated as a part of the program."""
        body, length = equation.params["jaxpr"], equation.params["length"]
        consts, carry, rows = split_operands(equation, inputs)
        stacks: list[Any] = []
        if length > 1:
            first = [x[:-1] for x in rows]
            carry, stacks = run_steps(equation, consts, carry, first, length - 1)
        outside, self._cost, self._is_in_microbatch = self._cost, program_cost(body), True
        found = evaluate(body, [*consts, *carry, *(x[-1] for x in rows)], self._outputs)
        self._cost, self._is_in_microbatch = outside, False
        rows = [(x.whole if isinstance(x, Pieces) else x)[None] for x in found[len(carry) :]]
        if stacks:
            rows = [jnp.concatenate(both) for both in zip(stacks, rows, strict=True)]
        return [*found[: len(carry)], *rows]


def run_steps(
    equation: Any, consts: list[Any], carry: list[Any], rows: list[Any], length: int
) -> tuple[list[Any], list[Any]]:
    """Run some steps of a scan; return what they carry on, and what they stack."""

    def run(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        found = evaluate(equation.params["jaxpr"], [*consts, *carry, *row])
        return found[: len(carry)], found[len(carry) :]

    options = {name: equation.params[name] for name in ("reverse", "unroll")}
    with equation.ctx.manager:
        return lax.scan(run, carry, rows, length=length, **options)


def _run_in_pieces(equation: Any, inputs: list[Any], num_pieces: int) -> list[Any]:
    """Run a reversed scan as several scans, each of which continues the one before."""
    length = equation.params["length"]
    consts, carry, rows = split_operands(equation, inputs)
    starts = [length * i // num_pieces for i in range(num_pieces + 1)]
    found: list[list[Any]] = []
    # the last rows come first
    for start, end in reversed(list(pairwise(starts))):
        carry, stacks = run_steps(equation, consts, carry, [x[start:end] for x in rows], end - start)
        found.insert(0, stacks)
    return [*carry, *(Pieces(0, each) for each in zip(*found, strict=True))]


def piece_by_piece(equation: Any, inputs: Sequence[Any]) -> Pieces | None:
    """Compute the output of an equation piece by piece; None if its rows depend on each other.

    Args:
      equation: any equation.
      inputs: arrays or `Pieces`, at least one `Pieces`.
    """
    given = [x for x in inputs if isinstance(x, Pieces)]
    pieces, name, params = given[0], equation.primitive.name, equation.params
    dim, shape = pieces.dim, equation.invars[0].aval.shape
    if name in ROW_BY_ROW:
        is_same = all((x.dim, x.bounds) == (dim, pieces.bounds) for x in given)
        return _row_by_row(equation, inputs, pieces) if is_same else None
    if len(inputs) > 1:
        return None
    # these rearrange dims, or remove others
    if name == "reshape" and params["dimensions"] is None:
        return _reshape(pieces, shape, params["new_sizes"])
    if name == "broadcast_in_dim":
        return _broadcast(pieces, shape, params["shape"], params["broadcast_dimensions"])
    new = find_moves(equation, 0).get(dim) if name in REARRANGING else None
    return None if new is None else Pieces(new, tuple(bind(equation, [x])[0] for x in pieces.arrays))


def _row_by_row(equation: Any, inputs: Sequence[Any], like: Pieces) -> Pieces | None:
    shape, dim = equation.outvars[0].aval.shape, like.dim
    whole = [jnp.shape(x) for x in inputs if not isinstance(x, Pieces)]
    if any(each and each != shape for each in whole):
        return None
    if equation.primitive.name == "sharding_constraint":
        sharding = equation.params["sharding"]
        if not isinstance(sharding, NamedSharding) or sharding.shard_shape(shape)[dim] != shape[dim]:
            return None

    def rows(x: Any, number: int) -> Any:
        if isinstance(x, Pieces):
            return x.arrays[number]
        return lax.slice_in_dim(x, *like.bounds[number], axis=dim) if jnp.shape(x) else x

    numbers = range(len(like.arrays))
    return Pieces(dim, tuple(bind(equation, [rows(x, n) for x in inputs])[0] for n in numbers))


def _broadcast(
    pieces: Pieces, old: tuple[int, ...], new: tuple[int, ...], dims: Sequence[int]
) -> Pieces | None:
    """Broadcast pieces; None if their dim is repeated."""
    dim = dims[pieces.dim]
    if new[dim] != old[pieces.dim]:
        return None
    shapes = [(*new[:dim], end - start, *new[dim + 1 :]) for start, end in pieces.bounds]
    arrays = zip(pieces.arrays, shapes, strict=True)
    return Pieces(dim, tuple(lax.broadcast_in_dim(x, shape, dims) for x, shape in arrays))


def _reshape(pieces: Pieces, old: tuple[int, ...], new: tuple[int, ...]) -> Pieces | None:
    """Reshape pieces; None unless the new shape keeps their dim."""
    before = math.prod(old[: pieces.dim])
    for dim, size in enumerate(new):
        if size == old[pieces.dim] and math.prod(new[:dim]) == before:
            arrays = (
                lax.reshape(x, (*new[:dim], x.shape[pieces.dim], *new[dim + 1 :])) for x in pieces.arrays
            )
            return Pieces(dim, tuple(arrays))
    return None
