"""Run the program of an island's gradients in parts, the last layers first, so that transfers start earlier.

The traced program is cut, so any model works. Next: `jaxpr/cut.py`,
`jaxpr/scan_pieces.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from shardtrain.functional.loss import Batch
from shardtrain.functional.sums import Sums
from shardtrain.jaxpr.cost import estimate_ready_costs
from shardtrain.jaxpr.cut import ProgramPart, cut_program
from shardtrain.jaxpr.forward import evaluate
from shardtrain.jaxpr.scan_pieces import Pieces, PiecewiseProgram
from shardtrain.system.xla_flags import step_options
from shardtrain.train_step.gradient_pieces import PiecePlan

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
        outputs = _start(cut, inputs)
        others = jax.tree.map(outputs.__getitem__, cut.others)
        for part, grads in enumerate(cut.grads):
            sent = {name: outputs[number] for name, number in grads.items()}
            yield GradientPart(sent, others[0].count, others if part == len(cut.grads) - 1 else None)

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
            return sent, jax.tree.map(_join, others, is_leaf=lambda x: isinstance(x, Pieces))

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


def _start(cut: _Cut, inputs: Sequence[Any]) -> dict[int, Any]:
    """Start all parts, and return the outputs of the whole program by their numbers.

    On CPUs the programs that one thread starts run in order; another thread starts the programs of buckets.
    """
    values: dict[Any, Any] = {}
    outputs: dict[int, Any] = {}
    for part, run in cut.parts:
        returned, sent = run([inputs[n] for n in part.reads], [values[v] for v in part.received])
        outputs.update(zip(part.returns, returned, strict=True))
        values.update(zip(part.sent, sent, strict=True))
    return outputs


def _compile(part: ProgramPart, shardings: Mapping[int, Any], options: Any) -> Any:
    num_returned = len(part.returns)

    def part_of_gradients(inputs: list[Any], received: list[Any]) -> tuple[list[Any], list[Any]]:
        found = evaluate(part.closed, [*inputs, *received])
        return found[:num_returned], found[num_returned:]

    # values between parts keep the shardings that the compiler gives them
    outputs = [shardings[n] for n in part.returns]
    return jax.jit(part_of_gradients, out_shardings=(outputs, None), compiler_options=options)


def _join(x: Any) -> Any:
    return x.whole if isinstance(x, Pieces) else x
