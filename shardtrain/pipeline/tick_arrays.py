"""A lock-step table as the arrays that a mesh walks over, one row a tick: what to do, and where values lie.

Values wait in slots: a part's input from its arrival until it is needed no more, and the error of its
output likewise. As many slots are made as live at once. Next: `mesh_pipeline.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardtrain.pipeline.table import KINDS, Table

NONE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Ticks:
    """A table for a program that all stages run in step.

    Args:
      columns: name -> int32 (ticks, stages); -1 is nothing. For each kind of task the microbatch, the
        chunk and the slots of its input and of its error: forward, forward_chunk, forward_input, ...;
        and the slots into which what arrives at the start of a tick goes: arriving_input, arriving_error.
      num_inputs: slots for inputs.
      num_errors: slots for errors.
    """

    columns: Mapping[str, np.ndarray]
    num_inputs: int
    num_errors: int


def make_ticks(table: Table) -> Ticks:
    """The arrays of a table.

    Args:
      table: checked; one of the lock-step form, or any that has one task a stage and tick.
    """
    at = {(t.kind, t.chunk * table.num_stages + t.stage, t.microbatch): t.tick for t in table.tasks}
    columns = {
        name: np.full((table.num_ticks, table.num_stages), NONE, np.int32)
        for name in (
            *(f"{kind}{what}" for kind in KINDS for what in ("", "_chunk", "_input", "_error")),
            "arriving_input",
            "arriving_error",
        )
    }
    inputs, errors = _lives(table, at)
    input_slots, num_inputs = _slots(inputs, table.num_stages)
    error_slots, num_errors = _slots(errors, table.num_stages)
    for task in table.tasks:
        part, where = task.chunk * table.num_stages + task.stage, (task.tick, task.stage)
        columns[task.kind][where] = task.microbatch
        columns[f"{task.kind}_chunk"][where] = task.chunk
        columns[f"{task.kind}_input"][where] = input_slots[part, task.microbatch]
        columns[f"{task.kind}_error"][where] = error_slots.get((part, task.microbatch), NONE)
    for name, lives, slots, made in (
        ("arriving_input", inputs, input_slots, 0),
        ("arriving_error", errors, error_slots, table.num_parts - 1),
    ):
        for (part, microbatch), (begin, _) in lives.items():
            if part != made:
                columns[name][begin, part % table.num_stages] = slots[part, microbatch]
    return Ticks(columns=columns, num_inputs=num_inputs, num_errors=num_errors)


Lives = dict[tuple[int, int], tuple[int, int]]
"""(part, microbatch) -> first and last tick in which a value is needed."""


def _lives(table: Table, at: Mapping[tuple[str, int, int], int]) -> tuple[Lives, Lives]:
    """When the input and the error of each part and microbatch live."""
    inputs: Lives = {}
    errors: Lives = {}
    last = table.num_parts - 1
    for (kind, part, microbatch), tick in at.items():
        if kind != "forward":
            continue
        ends = [at.get((other, part, microbatch), tick) for other in KINDS]
        begin = at["forward", part - 1, microbatch] + 1 if part else tick
        inputs[part, microbatch] = (begin, max(ends))
        backward = at.get(("backward", part, microbatch))
        if backward is not None and (part < last or table.has_weight):
            # the last part's error is made in its own backward, and only a later weight task needs it
            made = at["backward", part + 1, microbatch] + 1 if part < last else backward
            errors[part, microbatch] = (made, max(backward, at.get(("weight", part, microbatch), backward)))
    return inputs, errors


def _slots(lives: Lives, num_stages: int) -> tuple[dict[tuple[int, int], int], int]:
    """A slot for each value, none for two at once on one stage; and how many that takes."""
    found: dict[tuple[int, int], int] = {}
    most = 0
    for stage in range(num_stages):
        mine = sorted((life, key) for key, life in lives.items() if key[0] % num_stages == stage)
        busy: list[tuple[int, int]] = []
        for (begin, end), key in mine:
            busy = [(until, slot) for until, slot in busy if until >= begin]
            slot = _first_free(slot for _, slot in busy)
            busy.append((end, slot))
            found[key] = slot
            most = max(most, slot + 1)
    return found, most


def _first_free(taken: Iterable[int]) -> int:
    used: Sequence[int] = list(taken)
    return next(slot for slot in range(len(used) + 1) if slot not in used)
