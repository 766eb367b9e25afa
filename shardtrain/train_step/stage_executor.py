"""Execute the tasks of one pipeline stage across islands, in the order of a table.

It receives what a task needs and sends what it computed. Next: `stage_programs.py`, the computations.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardtrain.pipeline.flow import Flow, Value
from shardtrain.pipeline.table import Table, Task
from shardtrain.train_step.stage_programs import Arrays, StagePrograms

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI

Direction = Literal["activations", "cotangents"]


class _Message(NamedTuple):
    """An array sent between two parts: a value to a part that reads it, or the cotangent from that part."""

    direction: Direction
    value: Value
    reader: int
    microbatch: int

    @property
    def sender(self) -> int:
        """The part that computes the array."""
        return self.value.part if self.direction == "activations" else self.reader

    @property
    def receiver(self) -> int:
        """The part that needs the array."""
        return self.reader if self.direction == "activations" else self.value.part


class StageExecutor:
    """Executes the tasks of one stage.

    Args:
      table: the tasks of all stages; not in lock-step.
      flow: the values between the parts of the model.
      mailbox: to the other stages.
    """

    def __init__(self, table: Table, flow: Flow, mailbox: "Mailbox") -> None:
        self._table, self._flow, self._mailbox = table, flow, mailbox
        self._order = table.order(mailbox.stage)
        self._values = sorted(flow.shapes)
        # arrays between two parts that are both on this stage
        self._local: dict[_Message, Any] = {}
        # (part, microbatch) -> the inputs of its forward, which its backward reads again
        self._inputs: dict[tuple[int, int], Arrays] = {}

    def run(self, programs: StagePrograms, kind: str | None = None) -> None:
        """Run the tasks of a step.

        Args:
          programs: the computations.
          kind: the kind of the tasks to run; None runs all kinds.
        """
        for task in self._order:
            if kind is not None and task.kind != kind:
                continue
            part = self._table.part(task)
            # the only wait: all stages follow the same table, so what a task needs is sent before it
            arrived = self._receive_all(programs, task, part)
            if task.kind == "weight":
                programs.weight(part, task.microbatch)
            else:
                run = self._forward if task.kind == "forward" else self._backward
                run(programs, part, task.microbatch, arrived)
        # whatever is left was computed for a task that the table does not have
        assert kind == "forward" or not self._local
        assert kind == "forward" or not self._inputs

    def _receive_all(self, programs: StagePrograms, task: Task, part: int) -> Arrays:
        """Wait for the arrays of other parts that a task needs, and return them by value."""
        flow, m = self._flow, task.microbatch
        if task.kind == "forward":
            return {
                value: self._receive(programs, _Message("activations", value, part, m))
                for value in flow.reads[part]
            }
        if task.kind == "weight":
            return {}  # its backward has kept what it needs
        cotangents = {}
        for value in filter(flow.has_cotangent, flow.writes[part]):
            # several parts may have read the value: their cotangents of it are added up
            found = [
                self._receive(programs, _Message("cotangents", value, reader, m))
                for reader in flow.readers(value)
            ]
            cotangents[value] = found[0] if len(found) == 1 else programs.add(found)
        return cotangents

    def _forward(self, programs: StagePrograms, part: int, microbatch: int, inputs: Arrays) -> None:
        outputs = programs.forward(part, microbatch, inputs)
        for value in self._flow.writes[part]:
            # straight to every part that reads it, also across several stages
            for reader in self._flow.readers(value):
                self._send(outputs[value], _Message("activations", value, reader, microbatch))
        if "backward" in self._table.kinds:
            self._inputs[part, microbatch] = inputs

    def _backward(self, programs: StagePrograms, part: int, microbatch: int, cotangents: Arrays) -> None:
        inputs = self._inputs.pop((part, microbatch))
        found = programs.backward(part, microbatch, inputs, cotangents)
        for value in filter(self._flow.has_cotangent, inputs):
            self._send(found[value], _Message("cotangents", value, part, microbatch))

    def _send(self, array: Any, message: _Message) -> None:
        """Send an array to the stage of its receiver; keep it here if that is this stage."""
        stage = self._table.part_placement.stage(message.receiver)
        if stage == self._mailbox.stage:
            self._local[message] = array
        else:
            self._mailbox.send(array, stage, self._tag(message))

    def _receive(self, programs: StagePrograms, message: _Message) -> Any:
        """Receive the array that `_send` sent to this stage, or kept here."""
        stage = self._table.part_placement.stage(message.sender)
        if stage == self._mailbox.stage:
            return self._local.pop(message)
        shape = self._flow.shapes[message.value]
        what = f"{message.direction} of microbatch {message.microbatch} from part {message.sender}"
        array = self._mailbox.receive(shape.shape, shape.dtype, stage, self._tag(message), what)
        return programs.to_devices(message.value, array)

    def _tag(self, message: _Message) -> int:
        """Return the MPI tag of a message; no two messages of a step have the same."""
        _, value, reader, microbatch = message
        of_value = self._values.index(value) * self._table.num_parts + reader
        of_direction = of_value * 2 + (message.direction == "cotangents")
        return of_direction * self._table.num_microbatches + microbatch
