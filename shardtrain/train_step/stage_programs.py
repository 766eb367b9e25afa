"""The compiled programs of one pipeline stage across islands, one call per task, and who compiles them first.

Next: `stage_functions.py`, what is compiled; `stage_executor.py`, which calls the programs in the order of a
table.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree
from shardtrain.functional.sums import Sums
from shardtrain.jaxpr.deferred_outputs import Deferred
from shardtrain.pipeline.flow import Value
from shardtrain.train_step.channel import AllGather
from shardtrain.train_step.stage_functions import StageFunctions, TaskInputs

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
        self, params: Tree, model_state: Tree, key: jax.Array, batch: Batch, has_weight: bool = False
    ) -> None:
        """Prepare the tasks of a step.

        Args:
          params: the parameters of the stage, with borrowed ones.
          model_state: the model state of the stage.
          key: the random key of the step.
          batch: every array (M, rows, ...) on the mesh.
          has_weight: whether the table has weight tasks.
        """
        self._has_weight = has_weight
        batch, first_rows, self.model_state = self._by_replica(batch, model_state)
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
        sums = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            compiled.output_shardings,
        )
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

    def to_devices(self, value: Value, array: np.ndarray) -> jax.Array:
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
