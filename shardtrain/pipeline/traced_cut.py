"""Cut any model into parts by tracing it, without changing its code, where few values cross.

A piece is the program between two neighbouring places to cut; a part of a pipeline has some pieces. Each
parameter belongs to the first stage that reads it; later stages borrow it. Next: `stage_model.py`.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import use_abstract_mesh

from shardtrain.errors.messages import problems_error
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model, Tree, group_by_path, path_text
from shardtrain.functional.rng import new_key
from shardtrain.functional.traced_loss import ONE
from shardtrain.jaxpr.cut import ProgramPart
from shardtrain.jaxpr.forward import evaluate
from shardtrain.jaxpr.segments import Program
from shardtrain.pipeline.boundaries import Boundaries, Boundary
from shardtrain.pipeline.costs import STATE, count_flops
from shardtrain.pipeline.flow import Flow, Value
from shardtrain.pipeline.partition import Costs
from shardtrain.pipeline.stacking import Partition

MOST_PROBLEMS = 6
"""Number of places that are named in the error for a model that cannot be cut."""


class ModelTrace:
    """A traced model and its loss, and the places where they can be cut.

    Args:
      model: any model.
      loss: the function that calls the model.
      microbatch: name -> array or shape (rows, ...).

    Raises:
      ValueError: the operations of the program depend on the number of rows.
    """

    stacked = False

    def __init__(self, model: Model, loss: Loss, microbatch: Mapping[str, Any]) -> None:
        self.model, self.loss = model, loss
        self.batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in microbatch.items()}
        self.params, self.model_state = jax.eval_shape(model.init, new_key(0))
        params, states = (tuple(group_by_path(tree)) for tree in (self.params, self.model_state))
        self._states = states
        self._paths = (*params, *(f"{STATE}{path}" for path in states))
        # a single row would be traced in another way, and a second number shows which dims are rows
        self._program, wide = (self._trace_rows(self.batch, True, factor) for factor in (2, 4))
        self._evaluation = self._trace_rows(self.batch, False, 2)
        self._boundaries = Boundaries(
            program=self._program,
            wide=wide,
            evaluation=self._evaluation,
            params=params,
            states=states,
            num_rows=2 * next(iter(self.batch.values())).shape[0],
        )

    @property
    def num_blocks(self) -> int:
        """The number of pieces."""
        return len(self._boundaries.found) + 1

    @property
    def sent_bytes(self) -> list[float]:
        """Bytes that one row sends after each piece except the last."""
        return [float(sum(value.num_bytes for value in each.sent)) for each in self._boundaries.found]

    def is_block(self, path: str) -> bool:
        """Return False: no parameter belongs to a block, as its stages are those that read it."""
        return False

    @property
    def losses(self) -> Any:
        """Shapes of what the loss returns: (sum, count, metrics)."""
        shapes = [_shape(v.aval) for v in self._program.results]
        return jax.tree.unflatten(self._program.result_structure, shapes)

    def own_params(self) -> dict[str, Any]:
        """Return path -> shape of the parameters, in the order of their first use."""
        found = group_by_path(self.params)
        order = [self._paths[number] for number in self._program.first_use if number < len(found)]
        return {path: found[path] for path in dict.fromkeys([*order, *found])}

    def format_sent(self, stages: Partition, part: int) -> list[str]:
        """Format the dtypes and shapes of the values that are sent after a part."""
        cuts = self._cuts(stages)
        return [str(value) for value in cuts[part].sent] if part < len(cuts) else []

    def bytes_behind(self, stages: Partition, part: int) -> int:
        """Return the bytes that each row sends after a part."""
        cuts = self._cuts(stages)
        return sum(value.num_bytes for value in cuts[part].sent) if part < len(cuts) else 0

    # -- the parts of a cut --

    def check(self, num_parts: int) -> None:
        """Check that there are at least as many pieces as parts.

        Raises:
          ValueError: there are fewer; it says where the model cannot be cut, and why.
        """
        if num_parts <= self.num_blocks:
            return
        problems = [*self._boundaries.problems[:MOST_PROBLEMS], *self._large_operations()]
        use = f"use --partitions {self.num_blocks}" if self.num_blocks > 1 else "use --across data"
        pieces = f"{self.num_blocks} piece{'' if self.num_blocks == 1 else 's'}"
        raise problems_error(
            f"the model is cut by tracing, has {pieces} and cannot be cut into {num_parts} parts; {use}",
            problems or ["it has too few layers with parameters"],
        )

    def _large_operations(self) -> list[str]:
        """Return a problem for each operation that contains a program and reads several parameters."""
        found = []
        for primitive, read in self._program.large_operations:
            first, *_, last = (self._paths[weight] for weight in sorted(read))
            found.append(
                f"one operation ({primitive}) reads {len(read)} parameters, from {first} to"
                f" {last}; write it as several, or give the model `blocks` (docs/pipeline.md)"
            )
        return found

    def _cuts(self, stages: Partition) -> list[Boundary]:
        """Return the boundaries between the parts."""
        return [self._boundaries.found[start - 1] for start in stages.starts[1:]]

    def _positions(self, program: Program, stages: Partition) -> list[int]:
        """Return the positions where the parts of a program begin, and its end."""
        between = [self._boundaries.position(program, boundary) for boundary in self._cuts(stages)]
        return [0, *between, len(program.equations)]

    def _find_states(self, stages: Partition, part: int) -> list[int]:
        """Return the numbers of the model states of a part; the last part has the unused ones."""
        ends = [*(boundary.states for boundary in self._cuts(stages)), frozenset(range(len(self._states)))]
        return sorted(ends[part] - (ends[part - 1] if part else frozenset()))

    def _part(self, program: Program, stages: Partition, part: int) -> ProgramPart:
        begin, end = self._positions(program, stages)[part : part + 2]
        return program.part(begin, end, self._find_states(stages, part))

    def _parts(self, program: Program, stages: Partition) -> list[ProgramPart]:
        return [self._part(program, stages, part) for part in range(len(stages.counts))]

    def part_paths(self, stages: Partition, part: int) -> frozenset[str]:
        """Return the paths of the parameters and model state (`model_state/...`) that a part reads."""
        both = [self._part(program, stages, part) for program in (self._program, self._evaluation)]
        states = (f"{STATE}{self._states[state]}" for state in self._find_states(stages, part))
        read = (self._paths[n] for each in both for n in each.reads if n < len(self._paths))
        return frozenset([*read, *states])

    def run_part(
        self,
        stages: Partition,
        part: int,
        params: Tree,
        model_state: Tree,
        rng: Any,
        train: bool,
        batch: Batch,
        activations: Any,
    ) -> tuple[Any, Tree]:
        """Run a part, see `StageModel.run`; the activations are a list of the values that cross."""
        program = self._traced(rng, batch, train)
        positions = self._positions(program, stages)
        found, states = self._part(program, stages, part), self._find_states(stages, part)
        paths, returned = self._paths, len(found.returns)
        weights = group_by_path(params) | {
            f"{STATE}{path}": x for path, x in group_by_path(model_state).items()
        }
        entering = dict(zip(program.crossing(positions[part]), activations, strict=True))
        rest = jax.tree.leaves((rng, dict(batch)))
        given = [
            *(weights[paths[n]] if n < len(paths) else rest[n - len(paths)] for n in found.reads),
            *(entering[v] for v in found.received),
        ]
        outputs = evaluate(found.closed, given)
        changed = dict(zip((self._states[state] for state in states), outputs, strict=False))
        new_state = jax.tree.map_with_path(lambda path, old: changed.get(path_text(path), old), model_state)
        if part < len(stages.counts) - 1:
            values = entering | dict(zip(found.sent, outputs[returned:], strict=True))
            return [values[v] for v in program.crossing(positions[part + 1])], new_state
        loss_sum, count, metrics = jax.tree.unflatten(
            program.result_structure, outputs[len(states) : returned]
        )
        return (loss_sum, (count, metrics)), new_state

    def flow(self, stages: Partition, microbatch: Mapping[str, Any]) -> Flow:
        """Return the values between the parts.

        Args:
          stages: the partition of the pieces.
          microbatch: name -> array or shape (rows, ...).

        Raises:
          ValueError: training and evaluation read other values.
        """
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in microbatch.items()}
        trained, evaluated = (self._flow(stages, self._trace_rows(shapes, train)) for train in (True, False))
        if trained.reads != evaluated.reads:
            raise ValueError(
                "the model was cut by tracing, and reads other values in evaluation than in training where it"
                " was cut; cut it elsewhere (--stages with numbers of pieces), or give it `blocks`"
                " (docs/pipeline.md)"
            )
        return trained

    def _flow(self, stages: Partition, program: Program) -> Flow:
        positions, parts = self._positions(program, stages), self._parts(program, stages)
        crossing = [program.crossing(position) if position else [] for position in positions[:-1]]
        # a value is named by the part that computes it, and its index among those that are sent after it
        values = {
            v: Value(part, crossing[part + 1].index(v)) for part, each in enumerate(parts) for v in each.sent
        }
        shapes = {value: _shape(v.aval) for v, value in values.items()}
        reads = tuple(tuple(dict.fromkeys(values[v] for v in each.received)) for each in parts)
        read = sorted({value for each in reads for value in each})
        return Flow(
            activations=tuple([shapes[values[v]] for v in each] for each in crossing),
            sources=tuple(tuple(values[v] for v in each) for each in crossing),
            reads=reads,
            writes=tuple(tuple(v for v in read if v.part == part) for part in range(len(parts))),
            shapes={value: shapes[value] for value in read},
        )

    # -- costs --

    def costs(self, by: str) -> Costs:
        """Return the cost of each piece: "params", numbers of parameters; or "flops", of a forward pass."""
        if by == "params":
            sizes = {path: x.size for path, x in group_by_path(self.params).items()}
            befores = [frozenset[str](), *(each.params for each in self._boundaries.found), frozenset(sizes)]
            return Costs(blocks=[float(sum(sizes[p] for p in b - a)) for a, b in pairwise(befores)])
        known: dict[str, float] = {}
        stages = Partition(num_stages=self.num_blocks, counts=(1,) * self.num_blocks)
        return Costs(blocks=[_flops(part, known) for part in self._parts(self._program, stages)])

    # -- tracing --

    def _trace_rows(self, batch: Mapping[str, Any], train: bool, factor: int = 1) -> Program:
        """Trace for a multiple of the rows of a batch, outside any mesh."""
        shapes = {
            name: jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), x.dtype)
            for name, x in batch.items()
        }
        with use_abstract_mesh(ONE):
            return self._traced(jax.eval_shape(lambda: new_key(0)), shapes, train)

    def _traced(self, rng: Any, batch: Mapping[str, Any], train: bool) -> Program:
        weights, structure = jax.tree.flatten((self.params, self.model_state))
        rest, rest_structure = jax.tree.flatten((rng, dict(batch)))

        def function(weights: list[Any], rest: list[Any]) -> Any:
            params, model_state = jax.tree.unflatten(structure, weights)
            rng, batch = jax.tree.unflatten(rest_structure, rest)
            states = [model_state]

            def apply(*inputs: Any) -> Any:
                outputs, states[0] = self.model.apply(params, model_state, rng, train, *inputs)
                return outputs

            results = sum_loss(self.loss, apply, batch, train, rng)
            return jax.tree.leaves(states[0]), results

        num_states = len(jax.tree.leaves(self.model_state))
        return Program(function, weights, num_states, [_shape(x) for x in rest])


def _flops(part: ProgramPart, known: dict[str, float]) -> float:
    """Return the flops of a part, counted once for parts of the same equations."""
    text = str(part.closed.jaxpr)
    if text not in known:
        shapes = [_shape(v.aval) for v in part.closed.jaxpr.invars]
        known[text] = count_flops(lambda *inputs: evaluate(part.closed, inputs), *shapes)[0]
    return known[text]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
