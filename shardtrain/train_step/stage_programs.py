"""The compiled programs of one pipeline stage across islands: tasks, gradients, updates; who compiles first.

Next: `stage_functions.py`, what is compiled; `stage_compute.py`, which calls the programs in the order of a
table.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import group_by_path
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree, path_text
from shardtrain.functional.sums import Sums
from shardtrain.jaxpr.deferred_outputs import Deferred
from shardtrain.optim.clip import clip_gradients
from shardtrain.pipeline.flow import Value
from shardtrain.train_step.drift import make_own_params
from shardtrain.train_step.gradients import merge_replicas, sum_replicas
from shardtrain.train_step.island_combiner import AllGather, join_metrics
from shardtrain.train_step.placement import Placement, attach_shardings
from shardtrain.train_step.stage_functions import StageFunctions, TaskInputs
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.update import (
    apply_gradients,
    compute_gradient_metrics,
    keep_unless_skipped,
    make_own_update,
)

Arrays = dict[Value, Any]
"""Value between parts -> its array, or its cotangent."""


class StagePrograms:
    """The compiled programs of one stage, and their arrays during a step.

    Args:
      functions: the functions of this stage, for training or for evaluation.
    """

    def __init__(self, functions: StageFunctions) -> None:
        self._flow, self._train = functions.flow, functions.train
        self._last_part = functions.stage_model.last_part
        self.num_replicas = functions.num_replicas
        self._rows = NamedSharding(functions.placement.mesh, functions.rows)
        parts = functions.stage_model.parts
        self._forwards = {part: functions.compile_part(functions.forward, part) for part in parts}
        self._backwards, self._input_backwards, self._weights = (
            {part: functions.compile_part(function, part, donate_argnums=0) for part in parts}
            for function in (functions.backward, functions.input_backward, functions.weight)
        )
        self._initial_sums = functions.compile_part(functions.initial_sums, parts[-1])
        self._add = jax.jit(lambda trees: jax.tree.map(lambda *x: sum(x[1:], x[0]), *trees))
        self._by_replica = jax.jit(functions.split_by_replica)

    def begin(
        self,
        params: Tree,
        model_state: Tree,
        key: jax.Array,
        batch: Batch,
        first_row: int,
        has_weight: bool = False,
    ) -> None:
        """Prepare the tasks of a step.

        Args:
          params: the parameters of the stage, with borrowed ones.
          model_state: the model state of the stage.
          key: the random key of the step.
          batch: every array (M, rows, ...) on the mesh.
          first_row: the number of its first row in the whole batch.
          has_weight: whether the table has weight tasks.
        """
        self._has_weight = has_weight
        batch, first_rows, self.model_state = self._by_replica(batch, np.uint32(first_row), model_state)
        self._step = TaskInputs(params, self.model_state, key, first_rows, batch, np.int32(0))
        # a backward recomputes its forward, so it needs the model state that the forward began with
        self._state_before: dict[tuple[int, int], Tree] = {}
        # gradients that weight tasks will compute from what a backward has kept
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._sums: Sums | None = None

    def compile(self) -> None:
        """Compile the programs of all tasks; called after `begin`, before the first task.

        Otherwise the first calls would compile them one stage after the other, as each stage waits for arrays
        of another one.
        """
        lowered = self._initial_sums.lower(self._step)
        compiled = lowered.compile()
        sums = attach_shardings(lowered.out_info, compiled.output_shardings)
        for part, forward in self._forwards.items():
            inputs = [self._find_received(value) for value in self._flow.reads[part]]
            task = self._step._replace(inputs=inputs, cotangents=[])
            if part != self._last_part or not self._train:
                forward.lower(task).compile()
            if self._train:
                writes = filter(self._flow.has_cotangent, self._flow.writes[part])
                task = task._replace(cotangents=[self._find_received(value) for value in writes])
                backward = self._input_backwards if self._has_weight else self._backwards
                backward[part].lower(sums, task).compile()

    def _find_received(self, value: Value) -> jax.ShapeDtypeStruct:
        """Return the shape of a value as `to_devices` returns it."""
        shape = self._flow.shapes[value]
        rows, *rest = shape.shape
        dims = (self.num_replicas, rows // self.num_replicas, *rest)
        return jax.ShapeDtypeStruct(dims, shape.dtype, sharding=self._rows)

    @property
    def sums(self) -> Sums:
        """The sums so far."""
        # as large as the parameters, so not before a task that adds to them
        sums = self._initial_sums(self._step) if self._sums is None else self._sums
        self._sums = sums
        return sums

    def take_sums(self) -> Sums:
        """Return the sums of a step, and drop them here so that the caller may donate them."""
        sums, self._sums = self.sums, None
        return sums

    def forward(self, part: int, microbatch: int, inputs: Arrays) -> Arrays:
        """Compute the values that a part writes from the values that it reads."""
        if part == self._last_part and self._train:
            return {}  # its backward recomputes it, and no other part needs its output
        self._state_before[part, microbatch] = self.model_state
        found, self.model_state = self._forwards[part](self._inputs(part, microbatch, inputs, {}))
        if not self._train:
            del self._state_before[part, microbatch]
        if part == self._last_part:
            self._sums = self._add([self.sums, found])
            return {}
        return dict(zip(self._flow.writes[part], found, strict=True))

    def backward(self, part: int, microbatch: int, inputs: Arrays, cotangents: Arrays) -> Arrays:
        """Compute the cotangents of the values that a part read, given those of the values that it wrote."""
        is_last = part == self._last_part
        if is_last:
            # the forward task of the last part does nothing: this is its forward too
            self._state_before[part, microbatch] = self.model_state
        task = self._inputs(part, microbatch, inputs, cotangents)
        if self._has_weight:
            found, self._sums, model_state, grads = self._input_backwards[part](self.sums, task)
            self._deferred[part, microbatch] = grads.given(task)
        else:
            found, self._sums, model_state = self._backwards[part](self.sums, task)
        if is_last:
            self.model_state = model_state
        del self._state_before[part, microbatch]
        return dict(zip(filter(self._flow.has_cotangent, self._flow.reads[part]), found, strict=True))

    def weight(self, part: int, microbatch: int) -> None:
        """Compute the gradients of a part's weights after its backward, where they are separate tasks."""
        self._sums = self._weights[part](self.sums, self._deferred.pop((part, microbatch)))

    def _inputs(self, part: int, microbatch: int, inputs: Arrays, cotangents: Arrays) -> TaskInputs:
        return self._step._replace(
            model_state=self._state_before[part, microbatch],
            microbatch=np.int32(microbatch),
            inputs=[inputs[value] for value in self._flow.reads[part]],
            cotangents=[cotangents[value] for value in self._flow.writes[part] if value in cotangents],
        )

    def to_devices(self, array: np.ndarray) -> jax.Array:
        """Put received rows of a microbatch on this island: (R, rows, ...), sharded over its replicas."""
        array = array.reshape(self.num_replicas, -1, *array.shape[1:])
        return jax.device_put(array, self._rows)

    def add(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the sum of several cotangents of a value."""
        return self._add(list(arrays))


class CompileTurns:
    """Lets the first pipeline compile programs before other pipelines load them from a shared cache.

    Args:
      all_gather: gathers a value of every rank, by name.
      num_replicas: number of pipelines; with one nobody waits.
      waits: whether this island waits for the first pipeline, and loads its programs.

    >>> seen = []
    >>> turns = CompileTurns(lambda name, value: seen.append(name) or [], num_replicas=2, waits=True)
    >>> [turns.call("update", lambda x: seen.append("called") or x, number) for number in (1, 2)]
    [1, 2]
    >>> seen
    ['update of the first pipeline is compiled', 'called', 'called']
    """

    def __init__(self, all_gather: AllGather, num_replicas: int, waits: bool) -> None:
        self._all_gather, self._num_replicas, self._waits = all_gather, num_replicas, waits
        self._done: set[str] = set()

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that may compile, and return its result; all islands make the same calls."""
        first = name not in self._done and self._num_replicas > 1
        self._done.add(name)
        if first and self._waits:
            self._all_gather(f"{name} of the first pipeline is compiled", None)
        found = function(*arguments)
        if first and not self._waits:
            self._all_gather(f"{name} of the first pipeline is compiled", None)
        return found

    def once(self, name: str, function: Callable[[], Any]) -> None:
        """Call a function the first time only."""
        if name not in self._done:
            self.call(name, function)


class GradientPrograms(NamedTuple):
    """The programs that turn the sums of a step's tasks into gradients.

    Args:
      reduced: sums of the tasks -> (gradients of owned parameters, gradients of borrowed ones, loss sums).
      scaled: (gradients, gradients that borrowers returned, count) -> gradients of the mean loss.
      squares: gradients -> the square of their norm.
      loss_sums: sums of the tasks -> loss sums.
      merged_state: (model state of each replica of this island, weights) -> their average.
    """

    reduced: Callable[..., Any]
    scaled: Callable[..., Any]
    squares: Callable[..., Any]
    loss_sums: Callable[..., Any]
    merged_state: Callable[..., Any]


def make_gradient_programs(placement: Placement) -> GradientPrograms:
    """Compile the programs on gradients.

    Args:
      placement: the placement of the parameters that the stage owns.
    """
    mesh, specs = placement.mesh, placement.specs
    replica_axes = placement.layout.replica_axes
    whole, sharded = _make_shardings(placement)
    # the sums have gradients of borrowed parameters, too, which are returned to their owners
    owned = group_by_path(specs.abstract.params)

    def reduced(sums: Sums) -> tuple[Tree, dict[str, jax.Array], dict[str, Any]]:
        found = group_by_path(sums.grads)
        own = unflatten_dict({path: g for path, g in found.items() if path in owned}, sep="/")
        own = jax.tree.map(lambda g, spec: sum_replicas(g, spec, replica_axes, mesh), own, specs.sharded)
        borrowed = {path: g.sum(0) for path, g in found.items() if path not in owned}
        return own, borrowed, _sum_losses(sums)

    def scaled(grads: Tree, returned: list[dict[str, jax.Array]], count: jax.Array) -> Tree:
        def scale(path: Any, g: jax.Array) -> jax.Array:
            more = [found[path_text(path)] for found in returned if path_text(path) in found]
            return sum(more, g) / jnp.where(count > 0, count, 1)

        return jax.tree.map_with_path(scale, grads)

    return GradientPrograms(
        reduced=jax.jit(reduced, out_shardings=(sharded, whole, whole)),
        scaled=jax.jit(scaled, out_shardings=sharded, donate_argnums=0),
        squares=jax.jit(lambda grads: optax.tree.norm(grads, squared=True)),
        loss_sums=jax.jit(_sum_losses),
        merged_state=jax.jit(
            lambda state, weights: jax.tree.map(lambda x: merge_replicas(x, weights), state),
            out_shardings=whole,
        ),
    )


class StageUpdate(NamedTuple):
    """How a stage updates its parameters.

    Args:
      optimizer: the optimizer of the stage's parameters, without clipping by the norm of all stages.
      clip: the largest norm of the whole gradient; None disables clipping.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
    """

    optimizer: optax.GradientTransformation
    clip: float | None = None
    learning_rate: optax.Schedule | None = None


def make_update(how: StageUpdate, placement: Placement) -> Callable[..., tuple[State, Metrics]]:
    """Compile the update of a stage's own parameters by a gradient that was combined over pipelines.

    Args:
      how: optimizer and clipping.
      placement: the placement of the parameters that the stage owns.
    """

    def update(
        state: State,
        grads: Tree,
        model_state: Tree,
        totals: Any,
        squares: jax.Array,
        combine_state: Any,
        combine_metrics: Any,
    ) -> tuple[State, Metrics]:
        norm = jnp.sqrt(squares)
        found = Sums(grads=_clip(grads, norm, how.clip), model_state=model_state, **totals)
        # the norm is over all stages
        metrics = {**compute_gradient_metrics(found), "grad_norm": norm, **join_metrics(combine_metrics)}

        def updated(state: State) -> State:
            new = apply_gradients(how.optimizer, placement, state, found)
            return new._replace(combine_state=combine_state)

        return keep_unless_skipped(updated, placement, state, metrics, how.learning_rate)

    # the state is donated: parameters and optimizer state are updated in place
    whole, sharded = _make_shardings(placement)
    state = placement.state._replace(combine_state=whole)
    return jax.jit(
        update,
        in_shardings=(state, sharded, whole, whole, whole, whole, whole),
        out_shardings=(state, whole),
        donate_argnums=0,
    )


def make_stage_own_update(
    how: StageUpdate, placement: Placement, shardings: State
) -> tuple[Callable[[State], Any], Callable[..., tuple[State, Metrics]]]:
    """Compile the computation of a pipeline's own parameters, and their update, which is merged later.

    Args:
      how, placement: see `make_update`.
      shardings: the shardings of the state.
    """
    own_update = make_own_update(how.optimizer, placement, how.learning_rate)

    def update(
        state: State, grads: Tree, model_state: Tree, totals: Any, squares: jax.Array
    ) -> tuple[State, Metrics]:
        norm = jnp.sqrt(squares)
        return own_update(
            state, Sums(grads=_clip(grads, norm, how.clip), model_state=model_state, **totals), norm
        )

    whole, sharded = _make_shardings(placement)
    own = jax.jit(
        lambda state: make_own_params(state.params, state.local.drift), out_shardings=shardings.params
    )
    return own, jax.jit(
        update,
        in_shardings=(shardings, sharded, whole, whole, whole),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )


def _make_shardings(placement: Placement) -> tuple[NamedSharding, Any]:
    """Return the sharding of replicated arrays, and the shardings of gradients."""
    sharded = jax.tree.map(lambda spec: NamedSharding(placement.mesh, spec), placement.specs.sharded)
    return NamedSharding(placement.mesh, PartitionSpec()), sharded


def _sum_losses(sums: Sums) -> dict[str, Any]:
    return jax.tree.map(lambda x: x.sum(0), sums.of_loss)


def _clip(grads: Tree, norm: jax.Array, clip: float | None) -> Tree:
    return grads if clip is None else clip_gradients(grads, norm, clip)
