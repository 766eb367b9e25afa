"""Plan the pieces in which an island sends its gradients, and run their program in parts.

A piece is a gradient, or its rows that one piece of a scan over layers computes. All islands send the same
pieces after the same part, whatever their meshes and rows. The last layers come first. The traced
program is cut, so any model works. Next: `jaxpr/cut.py`, `jaxpr/scan_pieces.py`, `island_gradients.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional.loss import Batch
from shardtrain.functional.sums import Sums
from shardtrain.jaxpr.cost import estimate_ready_costs, parts_by_cost
from shardtrain.jaxpr.cut import ProgramPart, cut_program
from shardtrain.jaxpr.forward import evaluate
from shardtrain.jaxpr.scan_pieces import Pieces, PiecewiseProgram
from shardtrain.system.xla_flags import step_options

Local = Callable[[Any, Batch, jax.Array], tuple[Sums, dict[str, jax.Array]]]
"""(state, batch, first row) -> (`Sums` with gradients by path, other arrays of this island)."""


class GradientPiece(NamedTuple):
    """Consecutive rows of a gradient along one of its dims, or all of it.

    Args:
      path: the path of the parameter.
      dim: the dim.
      start, end: the first row, and the row after the last.
      size: the size of the dim.
    """

    path: str
    dim: int
    start: int
    end: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole gradient."""
        return (self.start, self.end) == (0, self.size)

    @property
    def name(self) -> str:
        """The path, with the rows if this is not the whole gradient.

        >>> GradientPiece("blocks/bias", 0, 2, 4, 4).name, GradientPiece("bias", 0, 0, 4, 4).name
        ('blocks/bias[2:4]', 'bias')
        """
        return self.path if self.is_whole else f"{self.path}[{self.start}:{self.end}]"

    def shape(self, of_gradient: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the piece, given the shape of the gradient."""
        if self.is_whole:
            return tuple(of_gradient)
        return (*of_gradient[: self.dim], self.end - self.start, *of_gradient[self.dim + 1 :])

    def spec(self, of_gradient: PartitionSpec) -> PartitionSpec:
        """Return the PartitionSpec of the piece, given the PartitionSpec of the gradient.

        The rows are not sharded, as their number may not be divisible.
        """
        if self.is_whole or len(of_gradient) <= self.dim:
            return of_gradient
        return PartitionSpec(*of_gradient[: self.dim], None, *of_gradient[self.dim + 1 :])

    def take(self, gradient: jax.Array | Pieces) -> jax.Array:
        """Select the piece from a gradient that is an array or `Pieces`, in a jit."""
        if isinstance(gradient, Pieces):
            if gradient.dim == self.dim and (self.start, self.end) in gradient.bounds:
                return gradient.arrays[gradient.bounds.index((self.start, self.end))]
            gradient = gradient.whole
        return gradient if self.is_whole else lax.slice_in_dim(gradient, self.start, self.end, axis=self.dim)


PiecePlan = Sequence[Sequence[GradientPiece]]
"""The pieces that each part of the program returns."""


class PartPlan(NamedTuple):
    """The pieces that the parts of a program send, and when.

    Args:
      pieces: the pieces of each part.
      ready: fraction of the cost of the whole program, for one microbatch, after which each part is ready.
      sizes_bytes: bytes that each part sends.
    """

    pieces: PiecePlan
    ready: tuple[float, ...]
    sizes_bytes: tuple[int, ...]


def plan_pieces(local: Local, num_parts: int, state: Any, batch: Batch, num_rows: int) -> PartPlan:
    """Divide the pieces of gradients among the parts of a program, by the cost to compute them.

    Args:
      local: the whole program.
      num_parts: the largest number of parts; there are fewer if few gradients are ready before the end.
      state, batch: arrays or shapes.
      num_rows: number of rows to trace, with one microbatch: the plan does not depend on an island's rows or
        on the number of microbatches, which may change in a run.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, num_rows, *x.shape[2:]), x.dtype), batch)
    first_row = jax.ShapeDtypeStruct((), np.uint32)
    traced, shapes = jax.make_jaxpr(local, return_shape=True)(state, one, first_row)
    pieces: list[GradientPiece] = []

    def run(*inputs: Any) -> list[Any]:
        outputs = PiecewiseProgram(num_parts).run(traced, inputs)
        found, _ = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        pieces[:] = [piece for path, gradient in found.grads.items() for piece in list_pieces(path, gradient)]
        return [found.loss_sum, *(piece.take(found.grads[piece.path]) for piece in pieces)]

    program = jax.make_jaxpr(run)(*traced.in_avals)
    # a program with effects is not cut: their order would change
    if program.effects or not pieces:
        whole = [piece for path, x in shapes[0].grads.items() for piece in list_pieces(path, x)]
        return PartPlan([whole], (1.0,), (_count_bytes(whole, shapes[0].grads),))
    # the loss ends the forward pass
    start, *costs = estimate_ready_costs(program)
    part_of = parts_by_cost(costs, start, num_parts)
    plan, ready = [], []
    for part in range(max(part_of) + 1):
        numbers = [number for number, each in enumerate(part_of) if each == part]
        plan.append([pieces[number] for number in numbers])
        ready.append(max(costs[number] for number in numbers) / max(costs))
    return PartPlan(plan, tuple(ready), tuple(_count_bytes(each, shapes[0].grads) for each in plan))


def _count_bytes(pieces: Sequence[GradientPiece], gradients: Mapping[str, Any]) -> int:
    return sum(
        math.prod(each.shape(gradients[each.path].shape)) * gradients[each.path].dtype.itemsize
        for each in pieces
    )


def list_pieces(path: str, gradient: Any) -> list[GradientPiece]:
    """Return the pieces of a gradient, which is an array, a shape, or `Pieces`."""
    if isinstance(gradient, Pieces):
        size = gradient.bounds[-1][1]
        return [GradientPiece(path, gradient.dim, *bounds, size) for bounds in gradient.bounds]
    size = gradient.shape[0] if gradient.shape else 1
    return [GradientPiece(path, 0, 0, size, size)]


def join_pieces(plan: PiecePlan, found: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Join pieces by name into path -> gradient, in a jit.

    >>> plan = [[GradientPiece("a", 0, 2, 3, 3)], [GradientPiece("a", 0, 0, 2, 3)]]
    >>> join_pieces(plan, {"a[0:2]": jnp.arange(2), "a[2:3]": jnp.ones(1, int)})["a"].tolist()
    [0, 1, 1]
    """
    by_path: dict[str, list[GradientPiece]] = {}
    for piece in sorted(piece for part in plan for piece in part):
        by_path.setdefault(piece.path, []).append(piece)
    return {
        path: found[path]
        if pieces[0].is_whole
        else jnp.concatenate([found[piece.name] for piece in pieces], pieces[0].dim)
        for path, pieces in by_path.items()
    }


Pack = Callable[[Mapping[str, jax.Array], jax.Array], dict[str, jax.Array]]
"""(name -> piece of a gradient, count) -> (name -> array that is sent)."""


class GradientPart(NamedTuple):
    """The gradients that are sent after one part of the program.

    Args:
      grads: name -> array.
      count: float32 scalar, examples.
      others: all other outputs of the program, (`Sums` without gradients, other arrays); None except for the
        last part.
    """

    grads: dict[str, jax.Array]
    count: jax.Array
    others: tuple[Sums, dict[str, jax.Array]] | None


class _Cut(NamedTuple):
    """The programs for batches of one shape.

    Args:
      parts: each program, and its function (inputs, values of earlier parts) -> (outputs, values for later
        parts).
      grads: for each part, name -> number of the output that is sent.
      others: the numbers of the other outputs, as in `GradientPart.others`.
    """

    parts: list[tuple[ProgramPart, Callable[..., tuple[list[Any], list[Any]]]]]
    grads: list[dict[str, int]]
    others: Any


class GradientParts:
    """The program of an island's gradients in parts, compiled for each shape of a batch.

    Args:
      program: the whole program, a jit of `gradient_pieces.Local`.
      plan: the pieces that each part returns.
      packs: the functions that pack the pieces of each part.
      shardings: name -> sharding of what the last part sends. Other parts gather what they send, as a later
        program for this would wait until the last part has run.
      whole: the replicated sharding.
    """

    def __init__(
        self,
        program: Any,
        plan: PiecePlan,
        packs: Sequence[Pack],
        shardings: Mapping[str, NamedSharding],
        whole: NamedSharding,
    ) -> None:
        self._program, self._plan, self._packs = program, plan, packs
        self._shardings, self._whole = shardings, whole
        self._cuts: dict[Any, _Cut] = {}

    def __call__(self, state: Any, batch: Batch, first_row: jax.Array) -> Iterator[GradientPart]:
        """Start all parts, and yield what each sends, without waiting."""
        inputs = jax.tree.leaves((state, batch, first_row))
        shapes = tuple((name, x.shape, x.dtype) for name, x in sorted(batch.items()))
        if shapes not in self._cuts:
            self._cuts[shapes] = self._cut(state, batch, first_row)
        cut = self._cuts[shapes]
        # on CPUs the programs that one thread starts run in order; another thread starts those of buckets
        values: dict[Any, Any] = {}
        outputs: dict[int, Any] = {}
        for part, run in cut.parts:
            returned, kept = run([inputs[n] for n in part.reads], [values[v] for v in part.received])
            outputs.update(zip(part.returns, returned, strict=True))
            values.update(zip(part.sent, kept, strict=True))
        others = jax.tree.map(outputs.__getitem__, cut.others)
        for number_of_part, grads in enumerate(cut.grads):
            sent = {name: outputs[number] for name, number in grads.items()}
            is_last = number_of_part == len(cut.grads) - 1
            yield GradientPart(sent, others[0].count, others if is_last else None)

    def _cut(self, state: Any, batch: Batch, first_row: jax.Array) -> _Cut:
        whole = self._program.trace(state, batch, first_row)
        traced, shapes = whole.jaxpr, whole.out_info

        def run(*inputs: Any) -> Any:
            outputs = PiecewiseProgram(len(self._plan)).run(traced, inputs)
            found, own = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
            sent = [
                pack({piece.name: piece.take(found.grads[piece.path]) for piece in pieces}, found.count)
                for pieces, pack in zip(self._plan, self._packs, strict=True)
            ]
            others = found._replace(grads={}), own
            is_pieces = lambda x: isinstance(x, Pieces)  # noqa: E731
            return sent, jax.tree.map(lambda x: x.whole if is_pieces(x) else x, others, is_leaf=is_pieces)

        program, shapes = jax.make_jaxpr(run, return_shape=True)(*traced.in_avals)
        structure = jax.tree.structure(shapes)
        grads, others = jax.tree.unflatten(structure, range(structure.num_leaves))
        part_of = {number: part for part, each in enumerate(grads) for number in each.values()}
        # gradients are returned by their planned part, other outputs by the first part that has computed them
        costs = estimate_ready_costs(program)
        most = [max(costs[number] for number in each.values()) for each in grads]
        for number in jax.tree.leaves(others):
            ready = (part for part, cost in enumerate(most) if costs[number] <= cost)
            part_of[number] = next(ready, len(grads) - 1)
        shardings = dict.fromkeys(part_of, self._whole)
        shardings |= {number: self._shardings[name] for name, number in grads[-1].items()}
        parts = cut_program(program, [part_of[number] for number in range(len(part_of))], len(grads))
        options = step_options(next(iter(self._whole.device_set)).platform)
        return _Cut([(part, _compile(part, shardings, options)) for part in parts], grads, others)


def _compile(part: ProgramPart, shardings: Mapping[int, Any], options: Any) -> Any:
    num_returned = len(part.returns)

    def part_of_gradients(inputs: list[Any], received: list[Any]) -> tuple[list[Any], list[Any]]:
        found = evaluate(part.closed, [*inputs, *received])
        return found[:num_returned], found[num_returned:]

    # values between parts keep the shardings that the compiler gives them
    outputs = [shardings[n] for n in part.returns]
    return jax.jit(part_of_gradients, out_shardings=(outputs, None), compiler_options=options)
