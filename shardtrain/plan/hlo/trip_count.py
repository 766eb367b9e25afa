"""Trip counts of loops of a compiled program.

XLA prints them for CPU and GPU; for TPU they follow from the loop counter: start, step and limit.
"""

import re

import numpy as np

from shardtrain.plan.hlo.dataflow import Frame, origin, value
from shardtrain.plan.hlo.text import Instruction

_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def trip_count(frame: Frame, loop: Instruction) -> int | None:
    """Return the number of iterations of a while loop.

    Args:
        frame: the frame of the loop.
        loop: the `while` instruction.

    Returns:
        The count that XLA prints, else from the loop counter (start, step, limit); None if neither is known.
    """
    printed = re.search(r"known_trip_count\D*(\d+)", loop.attributes)
    if printed:
        return int(printed.group(1))
    # the condition must compare a carried counter with a limit
    condition, body = frame.condition(loop), frame.body(loop)
    test = origin(condition, condition.computation.root.name)
    direction = test.instruction.attribute("direction")
    if test.instruction.opcode != "compare" or direction not in _MIRRORED:
        return None
    left, right = test.instruction.operands
    counter = _counter(test.frame, left, condition)
    # the counter may be on either side of the comparison
    if counter is None:
        left, right, direction = right, left, _MIRRORED[direction]
        counter = _counter(test.frame, left, condition)
    if counter is None:
        return None
    # the counter starts before the loop, and the body adds a constant step
    start, limit = _same(value(frame, loop.operands[0], (counter,))), _same(value(test.frame, right))
    step = _step(body, counter)
    if start is None or limit is None or not step:
        return None
    return _iterations(start, limit, step, direction)


def _counter(frame: Frame, name: str, condition: Frame) -> int | None:
    """Return the index of `name` in the tuple that the loop carries, None if it is not an element of it."""
    made = origin(frame, name)
    is_carried = made.instruction.opcode == "parameter" and made.frame.computation is condition.computation
    return made.elements[0] if is_carried and len(made.elements) == 1 else None


def _step(body: Frame, counter: int) -> int | None:
    """Return the number that an iteration adds to the counter."""
    update = origin(body, body.computation.root.name, (counter,))
    if update.instruction.opcode != "add":
        return None
    left, right = update.instruction.operands
    if _counter(update.frame, left, body) != counter:
        left, right = right, left
    if _counter(update.frame, left, body) != counter:
        return None
    return _same(value(update.frame, right))


def _same(per_device: np.ndarray | None) -> int | None:
    """Return the number that all devices have, None if they differ."""
    if per_device is None or (per_device != per_device[0]).any():
        return None
    return int(per_device[0])


def _iterations(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction in ("LT", "LE") and step > 0:
        return len(range(start, limit + (direction == "LE"), step))
    if direction in ("GT", "GE") and step < 0:
        return len(range(start, limit - (direction == "GE"), step))
    if direction == "NE" and (limit - start) % step == 0 and (limit - start) // step >= 0:
        return (limit - start) // step
    return None
