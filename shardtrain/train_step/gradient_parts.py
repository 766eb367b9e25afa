"""The program of an island's gradients in parts, so that those of the last layers are sent while others compute.

The traced program is cut, not the model, so any model works. All islands send the same pieces in the same
part, whatever their meshes and rows. Next: `functional/scan_pieces.py`, `functional/program_parts.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional.loss import Batch
from shardtrain.functional.program_parts import ProgramPart, cut_program, parts_by_cost, ready_costs
from shardtrain.functional.scan_pieces import Pieces, PiecewiseProgram
from shardtrain.functional.sums import Sums
from shardtrain.train_step.placement import Placement

Local = Callable[[Any, Batch, jax.Array], tuple[Sums, dict[str, jax.Array]]]
"""(state, batch, first row) -> (`Sums` with gradients by path, other arrays of this island)."""

Pack = Callable[[Mapping[str, jax.Array], jax.Array], dict[str, jax.Array]]
"""(name -> piece of a gradient, count) -> name -> what is sent."""


class GradientPiece(NamedTuple):
    """Consecutive rows of a gradient along one of its dims, or all of it.

    Args:
      path: of the parameter.
      dim: the dim.
      start, end: the rows.
      size: of the dim.
    """

    path: str
    dim: int
    start: int
    end: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole gradient."""
        return (self.start, self.end) == (0, self.size)

    @property
    def name(self) -> str:
        """The path, and which rows of it: that of a gradient as a whole is its path."""
        return self.path if self.is_whole else f"{self.path}[{self.start}:{self.end}]"

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return its shape, for that of the gradient."""
        return (*whole[: self.dim], self.end - self.start, *whole[self.dim + 1 :]) if whole else ()

    def spec(self, whole: PartitionSpec) -> PartitionSpec:
        """Return its PartitionSpec, for that of the gradient: a part of a dim is not sharded over it."""
        if self.is_whole or len(whole) <= self.dim:
            return whole
        return PartitionSpec(*whole[: self.dim], None, *whole[self.dim + 1 :])

    def take(self, gradient: Any) -> jax.Array:
        """Return it from a gradient, an array or `Pieces`."""
        if isinstance(gradient, Pieces):
            if gradient.dim == self.dim and (self.start, self.end) in gradient.bounds:
                return gradient.arrays[gradient.bounds.index((self.start, self.end))]
            gradient = gradient.whole
        if self.is_whole:
            return gradient
        return lax.slice_in_dim(gradient, self.start, self.end, axis=self.dim)


PiecePlan = list[list[GradientPiece]]
"""The pieces that each part of the program returns."""


def plan_pieces(local: Local, num_parts: int, state: Any, batch: Batch, num_rows: int) -> PiecePlan:
    """Return which gradients are ready after each part, by what computing them costs.

    Args:
      local: the whole program.
      num_parts: at most; fewer where too few gradients are ready before the end.
      state, batch: arrays or shapes.
      num_rows: rows to trace it with: a plan depends neither on the rows of an island nor on microbatches.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, num_rows, *x.shape[2:]), x.dtype), batch)
    traced, shapes = jax.make_jaxpr(local, return_shape=True)(state, one, jax.ShapeDtypeStruct((), np.uint32))
    grads = shapes[0].grads
    pieces: list[GradientPiece] = []

    def run(*inputs: Any) -> list[Any]:
        found = jax.tree.unflatten(
            jax.tree.structure(shapes), PiecewiseProgram(num_parts).run(traced, inputs)
        )
        pieces[:] = [piece for path in grads for piece in _pieces_of(path, found[0].grads[path])]
        return [piece.take(found[0].grads[piece.path]) for piece in pieces]

    cut = jax.make_jaxpr(run)(*traced.in_avals)
    if cut.effects or not pieces:
        return [[_pieces_of(path, x)[0] for path, x in grads.items()]]
    part_of = parts_by_cost(ready_costs(cut), num_parts)
    return [
        [piece for piece, each in zip(pieces, part_of, strict=True) if each == part]
        for part in range(max(part_of) + 1)
    ]


def _pieces_of(path: str, gradient: Any) -> list[GradientPiece]:
    if isinstance(gradient, Pieces):
        size = gradient.bounds[-1][1]
        return [GradientPiece(path, gradient.dim, *bounds, size) for bounds in gradient.bounds]
    size = gradient.shape[0] if gradient.shape else 1
    return [GradientPiece(path, 0, 0, size, size)]


class _Compiled(NamedTuple):
    """One part, as it is called.

    Args:
      part: the program.
      call: the compiled function, a list of arrays -> (what it returns, what it hands to later parts).
    """

    part: ProgramPart
    call: Callable[..., tuple[list[Any], list[Any]]]


class PartialGradients(NamedTuple):
    """What one part of the program returns: name -> what is sent; and the rest, by index of the outputs."""

    sent: dict[str, jax.Array]
    rest: dict[int, jax.Array]


class GradientParts:
    """The program of an island's gradients in parts, compiled for each shape of a batch.

    Args:
      local: the whole program.
      plan: the pieces that each part returns.
      packs: how the pieces of each part are packed.
      shardings: of what each part sends, by name.
      placement: the placement of this island.
    """

    def __init__(
        self,
        local: Local,
        plan: PiecePlan,
        packs: Sequence[Pack],
        shardings: Sequence[Mapping[str, Any]],
        placement: Placement,
    ) -> None:
        self._local, self._plan, self._packs, self._shardings = local, plan, packs, shardings
        self._whole = NamedSharding(placement.mesh, PartitionSpec())
        self._programs: dict[Any, tuple[list[_Compiled], Any]] = {}

    def __call__(
        self, state: Any, batch: Batch, first_row: Any
    ) -> Iterator[tuple[dict[str, jax.Array], tuple[Sums, dict[str, jax.Array]] | None]]:
        """Start all parts; yield what each sends, the last one with everything else that the program returns.

        Nothing is waited for.
        """
        inputs, structure = jax.tree.flatten((state, batch, first_row))
        key = (structure, *((jnp.shape(x), jnp.result_type(x)) for x in inputs))
        if key not in self._programs:
            self._programs[key] = self._cut(state, batch, first_row)
        programs, names = self._programs[key]
        handed: dict[Any, Any] = {}
        outputs: dict[int, Any] = {}
        for part, call in programs:
            found, sent = call([inputs[n] for n in part.reads], [handed[v] for v in part.received])
            outputs.update(zip(part.returns, found, strict=True))
            handed.update(zip(part.sent, sent, strict=True))
        numbers, structure = names
        rest = outputs_of_rest = None
        for part in range(len(programs)):
            grads = {name: outputs[number] for name, number in numbers[part].items()}
            is_last = part == len(programs) - 1
            if is_last:
                num = sum(map(len, numbers))
                rest = jax.tree.unflatten(structure, [outputs[n] for n in range(num, num + structure.num_leaves)])
            yield grads, rest

    def _cut(self, state: Any, batch: Batch, first_row: Any) -> Any:
        traced, shapes = jax.make_jaxpr(self._local, return_shape=True)(state, batch, first_row)
        structure = jax.tree.structure(shapes)

        def run(*inputs: Any) -> Any:
            found, own = jax.tree.unflatten(
                structure, PiecewiseProgram(len(self._plan)).run(traced, inputs)
            )
            sent = [
                pack({piece.name: piece.take(found.grads[piece.path]) for piece in pieces}, found.count)
                for pieces, pack in zip(self._plan, self._packs, strict=True)
            ]
            return sent, jax.tree.map(_whole, (found._replace(grads={}), own), is_leaf=_is_pieces)

        cut, (sent, rest) = jax.make_jaxpr(run, return_shape=True)(*traced.in_avals)
        # gradients are in the part of the plan; the rest is where it is ready
        part_of = [part for part, each in enumerate(sent) for _ in each]
        shardings = [self._shardings[part][name] for part, each in enumerate(sent) for name in sorted(each)]
        costs = ready_costs(cut)
        ready = [max(costs[n] for n, p in enumerate(part_of) if p == part) for part in range(len(sent))]
        for cost in costs[len(part_of) :]:
            part_of.append(min((p for p, most in enumerate(ready) if cost <= most), default=len(sent) - 1))
            shardings.append(self._whole)
        numbers, names = iter(range(len(part_of))), []
        for each in sent:
            names.append({name: next(numbers) for name in sorted(each)})
        parts = [_Compiled(part, _jitted(part, shardings)) for part in cut_program(cut, part_of)]
        return parts, (names, jax.tree.structure(rest))


def _jitted(part: ProgramPart, shardings: Sequence[Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
    function, num = jaxpr_as_fun(part.closed), len(part.returns)

    def gradients_part(inputs: list[Any], received: list[Any]) -> tuple[list[Any], list[Any]]:
        found = function(*inputs, *received)
        return list(found[:num]), list(found[num:])

    return jax.jit(gradients_part, out_shardings=([shardings[n] for n in part.returns], None))


def _is_pieces(x: Any) -> bool:
    return isinstance(x, Pieces)


def _whole(x: Any) -> Any:
    return x.whole if isinstance(x, Pieces) else x


def join_pieces(plan: PiecePlan, found: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return path -> gradient, from its pieces by name, in a jit."""
    by_path: dict[str, list[GradientPiece]] = {}
    for piece in sorted(piece for part in plan for piece in part):
        by_path.setdefault(piece.path, []).append(piece)
    return {
        path: found[pieces[0].name]
        if len(pieces) == 1
        else jnp.concatenate([found[piece.name] for piece in pieces], pieces[0].dim)
        for path, pieces in by_path.items()
    }
