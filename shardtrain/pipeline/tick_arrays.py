"""Convert a lock-step table to arrays that a mesh scans over, one row per tick, with a slot for each value.

Slots store the input of a part from its arrival until its last task, and the cotangent of its output in the
same way. There are as many slots as values are live at once. Next: `mesh_pipeline.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from shardtrain.pipeline.part_placement import PartPlacement
from shardtrain.pipeline.table import KINDS, Table

NONE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Ticks:
    """A table for a program that all stages run in lock-step.

    Args:
      columns: name -> int32 (ticks, stages); -1 is nothing. For each kind of task the microbatch, the chunk
        and the slots of its input and of its cotangent: forward, forward_chunk, forward_input, ...; and for
        each hop of the placement (see `PartPlacement.hops`) the slots for what arrives over it at the start
        of a tick: arriving_input_1, arriving_cotangent_1, ...
      num_inputs: slots for inputs.
      num_cotangents: slots for cotangents.
    """

    columns: Mapping[str, np.ndarray]
    num_inputs: int
    num_cotangents: int


LiveRanges = dict[tuple[int, int], tuple[int, int]]
"""(part, microbatch) -> (first tick, last tick) in which a value is needed."""


def make_ticks(table: Table) -> Ticks:
    """Return the arrays of a table, with a slot for each value.

    Args:
      table: checked; of the lock-step form, or any with at most one task per stage and tick.
    """
    placement = table.part_placement
    # 1. give each value a slot for as long as it is needed
    inputs, cotangents = _find_live_ranges(table)
    input_slots, num_inputs = _assign_slots(inputs, placement)
    cotangent_slots, num_cotangents = _assign_slots(cotangents, placement)
    # 2. start with empty columns: a stage that has no task in a tick finds -1 in all of them
    columns = {
        name: np.full((table.num_ticks, table.num_stages), NONE, np.int32)
        for name in (
            *(f"{kind}{what}" for kind in KINDS for what in ("", "_chunk", "_input", "_cotangent")),
            *(f"arriving_{what}_{hop}" for hop in placement.hops for what in ("input", "cotangent")),
        )
    }
    # 3. enter each task at its tick and stage, with the slots that it reads
    for task in table.tasks:
        key, cell = (table.part(task), task.microbatch), (task.tick, task.stage)
        columns[task.kind][cell] = task.microbatch
        columns[f"{task.kind}_chunk"][cell] = task.chunk
        columns[f"{task.kind}_input"][cell] = input_slots[key]
        columns[f"{task.kind}_cotangent"][cell] = cotangent_slots.get(key, NONE)
    # 4. enter the slots of the values that arrive from another part at the start of a tick: the first part
    # makes its own inputs, the last one its own cotangents
    for (part, microbatch), (begin, _) in inputs.items():
        if part > 0:
            column = columns[f"arriving_input_{placement.hop(part - 1)}"]
            column[begin, placement.stage(part)] = input_slots[part, microbatch]
    for (part, microbatch), (begin, _) in cotangents.items():
        if part < table.num_parts - 1:
            column = columns[f"arriving_cotangent_{placement.hop(part)}"]
            column[begin, placement.stage(part)] = cotangent_slots[part, microbatch]
    return Ticks(columns=columns, num_inputs=num_inputs, num_cotangents=num_cotangents)


def _find_live_ranges(table: Table) -> tuple[LiveRanges, LiveRanges]:
    """Return the live ranges of the input and of the cotangent of each part and microbatch."""
    ticks = {(task.kind, table.part(task), task.microbatch): task.tick for task in table.tasks}
    inputs: LiveRanges = {}
    cotangents: LiveRanges = {}
    last = table.num_parts - 1
    for (kind, part, microbatch), tick in ticks.items():
        if kind != "forward":
            continue
        # every task of a part reads its input, which arrives a tick after the part before computed it
        ends = [ticks.get((other, part, microbatch), tick) for other in KINDS]
        begin = ticks["forward", part - 1, microbatch] + 1 if part else tick
        inputs[part, microbatch] = (begin, max(ends))
        backward = ticks.get(("backward", part, microbatch))
        if backward is not None and (part < last or table.has_weight):
            # the last part computes its cotangent in its own backward; only a later weight task needs it
            begin = ticks["backward", part + 1, microbatch] + 1 if part < last else backward
            end = max(backward, ticks.get(("weight", part, microbatch), backward))
            cotangents[part, microbatch] = (begin, end)
    return inputs, cotangents


def _assign_slots(ranges: LiveRanges, placement: PartPlacement) -> tuple[dict[tuple[int, int], int], int]:
    """Give each value a slot that no other live value of its stage has; also return the number of slots."""
    found: dict[tuple[int, int], int] = {}
    for stage in range(placement.num_stages):
        # take the values of a stage in the order of their arrival, as a memory allocator sees them
        own = sorted((live, key) for key, live in ranges.items() if placement.stage(key[0]) == stage)
        busy: list[tuple[int, int]] = []
        for (begin, end), key in own:
            # slots whose values are no longer needed are free again; the new value gets the lowest free one
            busy = [(until, slot) for until, slot in busy if until >= begin]
            found[key] = _find_free(slot for _, slot in busy)
            busy.append((end, found[key]))
    return found, max(found.values(), default=-1) + 1


def _find_free(taken: Iterable[int]) -> int:
    used = set(taken)
    return next(slot for slot in range(len(used) + 1) if slot not in used)
