"""The compiled programs of one pipeline stage across islands, called task by task.

Next: `stage_executor.py`, which calls them in the order of a table; `stage_step.py`, the step.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardtrain.functional.deferred_outputs import Deferred
from shardtrain.functional.loss import Batch
from shardtrain.functional.model import Tree
from shardtrain.functional.sums import Sums
from shardtrain.pipeline.flow import Value
from shardtrain.train_step.stage_executor import Arrays
from shardtrain.train_step.stage_functions import StageFunctions, TaskInputs


class StagePrograms:
    """The compiled programs of one stage (a `stage_executor.Programs`), and their arrays during a step.

    Args:
      functions: of this stage, for training or for evaluation.
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
          params: of the stage, borrowed ones among them.
          model_state: of the stage.
          key: of the step.
          batch: every array (M, rows, ...) on the mesh.
          has_weight: the table has weight tasks.
        """
        self._has_weight = has_weight
        batch, first_rows, self.model_state = self._by_replica(batch, model_state)
        self._step = TaskInputs(params, self.model_state, key, first_rows, batch, np.int32(0))
        # a backward recomputes its forward, so it needs the model state that the forward began with
        self._state_before: dict[tuple[int, int], Tree] = {}
        # gradients that weight tasks will compute from what a backward has kept
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._outputs: Any = ()
        self._sums: Sums | None = None

    def compile(self) -> None:
        """Compile the programs of all tasks; called after `begin`, before the first task.

        Tasks would compile them when they are called: one stage after the other, as each waits for arrays of
        another one.
        """
        lowered = self._initial_sums.lower(self._step)
        compiled = lowered.compile()
        sums = jax.tree.map(_shape, lowered.out_info, compiled.output_shardings)
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

    def copy_for_batch(self, params: Tree, model_state: Tree, key: jax.Array, batch: Batch) -> Self:
        """Return the same programs with arrays of their own, begun for a batch; see `begin`."""
        programs = copy(self)
        programs.begin(params, model_state, key, batch)
        return programs

    @property
    def sums(self) -> Sums:
        """The sums so far."""
        # as large as the parameters, so not before a task that adds to them
        sums = self._initial_sums(self._step) if self._sums is None else self._sums
        self._sums = sums
        return sums

    def take_sums(self) -> Sums:
        """Return the sums of a step and drop them here, so that the caller may donate them."""
        sums, self._sums = self.sums, None
        return sums

    def forward(self, part: int, microbatch: int, inputs: Arrays) -> Arrays:
        """See `stage_executor.Programs`."""
        if part == self._last_part and self._train:
            return {}  # its backward recomputes it, and no other part needs its output
        self._state_before[part, microbatch] = self.model_state
        found, self.model_state = self._forwards[part](self._inputs(part, microbatch, inputs, {}))
        self._outputs = found
        if not self._train:
            del self._state_before[part, microbatch]
        if part == self._last_part:
            self._sums = self._add([self.sums, found])
            return {}
        return dict(zip(self._flow.writes[part], found, strict=True))

    def backward(self, part: int, microbatch: int, inputs: Arrays, cotangents: Arrays) -> Arrays:
        """See `stage_executor.Programs`."""
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
        """See `stage_executor.Programs`."""
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

    def sendable(self, array: jax.Array) -> jax.Array:
        """Return an array whose bytes are those of (rows, ...)."""
        return array

    def add(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """See `stage_executor.Programs`."""
        return self._add(list(arrays))

    def wait(self) -> None:
        """See `stage_executor.Programs`."""
        jax.block_until_ready((self._outputs, self._sums, self.model_state))


def _shape(like: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
