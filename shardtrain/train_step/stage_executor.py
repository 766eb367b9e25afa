"""The executor of one stage across islands: its tasks of a table in order, each once its inputs arrived.

It knows what a task waits for and what it sends to whom; what a task computes is up to its `Programs`.
Next: `stage_step.py`, which makes the programs.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardtrain.pipeline.flow import Flow, Value
from shardtrain.pipeline.table import Table, Task

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI

Arrays = dict[Value, Any]
Observe = Callable[[Task, float, float], None]
"""(task, seconds at its start, seconds at its end), by `time.perf_counter`."""


class Programs(Protocol):
    """The computations of a stage, on arrays as `landed` returns them."""

    def forward(self, part: int, microbatch: int, inputs: Arrays) -> Arrays:
        """Compute the values that a part writes, from those that it reads."""
        ...

    def backward(self, part: int, microbatch: int, inputs: Arrays, cotangents: Arrays) -> Arrays:
        """Compute the cotangents of the values that a part read, from those of the values that it wrote."""
        ...

    def weight(self, part: int, microbatch: int, inputs: Arrays, cotangents: Arrays) -> None:
        """Compute the gradients of a part's weights, where they are tasks of their own."""
        ...

    def landed(self, value: Value, array: np.ndarray) -> Any:
        """Put an array from another island onto the devices of this one."""
        ...

    def sendable(self, array: Any) -> Any:
        """Return the array (rows, ...) to send, whole on this process."""
        ...

    def added(self, arrays: Sequence[Any]) -> Any:
        """Return the sum of cotangents."""
        ...

    def wait(self) -> None:
        """Wait until everything so far is computed."""
        ...


class StageExecutor:
    """The executor of one stage.

    Args:
      table: the tasks of all stages; not of the lock-step form.
      flow: the values between the `table.num_parts` parts of the model.
      mailbox: to the other stages.
      observe: called after each task, with its times; tasks then run one after the other, without overlap.
    """

    def __init__(self, table: Table, flow: Flow, mailbox: "Mailbox", observe: Observe | None = None) -> None:
        self._table, self._flow, self._mailbox, self._observe = table, flow, mailbox, observe
        self._order = table.order(mailbox.stage)
        self._values = sorted(flow.shapes)
        self._here: dict[Any, Any] = {}
        self._kept: dict[tuple[int, int], tuple[Arrays, Arrays]] = {}

    def run(self, programs: Programs) -> None:
        """Run all tasks of a step."""
        does = {"forward": self._forward, "backward": self._backward, "weight": self._weight}
        for task in self._order:
            part = self._table.part(task)
            ready = self._ready(programs, task, part)
            start = time.perf_counter()
            does[task.kind](programs, part, task.microbatch, ready)
            if self._observe is not None:
                programs.wait()
                self._observe(task, start, time.perf_counter())
        assert not self._here
        assert not self._kept

    def _ready(self, programs: Programs, task: Task, part: int) -> Arrays:
        """Wait for the values of other parts that a task needs, and return them."""
        flow, m = self._flow, task.microbatch
        if task.kind == "forward":
            return {value: self._taken(programs, value, part, m, "stream") for value in flow.reads[part]}
        if task.kind == "weight":
            return {}
        errors = {}
        for value in filter(flow.has_error, flow.writes[part]):
            found = [self._taken(programs, value, reader, m, "error") for reader in flow.readers(value)]
            errors[value] = found[0] if len(found) == 1 else programs.added(found)
        return errors

    def _forward(self, programs: Programs, part: int, microbatch: int, inputs: Arrays) -> None:
        made = programs.forward(part, microbatch, inputs)
        for value in self._flow.writes[part]:
            for reader in self._flow.readers(value):
                self._given(programs, made[value], reader, value, reader, microbatch, "stream")
        if "backward" in self._table.kinds:
            self._kept[part, microbatch] = (inputs, {})

    def _backward(self, programs: Programs, part: int, microbatch: int, errors: Arrays) -> None:
        inputs, _ = self._kept.pop((part, microbatch))
        found = programs.backward(part, microbatch, inputs, errors)
        for value in filter(self._flow.has_error, inputs):
            self._given(programs, found[value], value.part, value, part, microbatch, "error")
        if self._table.has_weight:
            self._kept[part, microbatch] = (inputs, errors)

    def _weight(self, programs: Programs, part: int, microbatch: int, _: Arrays) -> None:
        programs.weight(part, microbatch, *self._kept.pop((part, microbatch)))

    def _given(
        self, programs: Programs, array: Any, to: int, value: Value, reader: int, microbatch: int, kind: str
    ) -> None:
        """Send a value, or the cotangent that a reader computed for it, to the stage of a part."""
        stage = self._table.part_placement.stage(to)
        if stage == self._mailbox.stage:
            self._here[kind, value, reader, microbatch] = array
        else:
            tag = self._tag(value, reader, microbatch, kind)
            self._mailbox.send(programs.sendable(array), stage, tag)

    def _taken(self, programs: Programs, value: Value, reader: int, microbatch: int, kind: str) -> Any:
        """Receive what `_given` sent to this stage, or kept here."""
        maker = value.part if kind == "stream" else reader
        stage = self._table.part_placement.stage(maker)
        if stage == self._mailbox.stage:
            return self._here.pop((kind, value, reader, microbatch))
        shape = self._flow.shapes[value]
        what = f"{kind} of microbatch {microbatch} from part {maker}"
        tag = self._tag(value, reader, microbatch, kind)
        return programs.landed(value, self._mailbox.receive(shape.shape, shape.dtype, stage, tag, what))

    def _tag(self, value: Value, reader: int, microbatch: int, kind: str) -> int:
        of_value = self._values.index(value) * self._table.num_parts + reader
        return (of_value * 2 + (kind == "error")) * self._table.num_microbatches + microbatch
